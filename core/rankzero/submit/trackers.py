"""A launcher's trackers, checked and made ready for the way to the driver."""

from __future__ import annotations

import base64
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from rankzero.engines.base import Engine
from rankzero.errors import InvalidJobError
from rankzero.submit.payload import TrainingPickler
from rankzero.tracking.tracker import Tracker


def check(trackers: object) -> None:
    """Raises InvalidJobError unless this is a sequence of trackers."""
    if not isinstance(trackers, (list, tuple)):
        raise InvalidJobError(f"trackers is {trackers!r}; give a list, such as [MLflow()]")
    for tracker in trackers:
        if not isinstance(tracker, Tracker):
            raise InvalidJobError(f"trackers has {tracker!r}; give objects of subclasses of rankzero.tracking.Tracker")


def pack(trackers: Sequence[Tracker], engine: Engine) -> dict[str, Any] | None:
    """The trackers as JSON, each a pickle, and where the driver finds the modules of their classes; None for none.

    Raises:
        InvalidJobError: one cannot be pickled, or cannot work here, where the driver will be.
    """
    pickles = []
    for tracker in trackers:
        if not engine.drives_elsewhere:
            tracker.check()
        buffer = io.BytesIO()
        try:
            TrainingPickler(buffer).dump(tracker)
        except Exception as error:
            raise InvalidJobError(
                f"trackers has {type(tracker).__name__}, which cannot be pickled: {error}; make clients in begin()"
            ) from error
        pickles.append(base64.b64encode(buffer.getvalue()).decode())
    path = [os.path.abspath(entry) for entry in sys.path]
    return {"pickles": pickles, "path": [] if engine.drives_elsewhere else path} if pickles else None
