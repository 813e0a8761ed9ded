"""Checks a launcher's trackers and packs them for the driver."""

from __future__ import annotations

import base64
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from rankzero.engines.base import Engine
from rankzero.errors import InvalidJobError
from rankzero.submit.pack_pickler import TrainingPickler
from rankzero.tracking.tracker import Tracker


def check(trackers: object) -> None:
    """Raises InvalidJobError unless the value is a list or tuple of trackers."""
    if not isinstance(trackers, (list, tuple)):
        raise InvalidJobError(f"trackers is {trackers!r}; give a list, such as [MLflow()]")
    for tracker in trackers:
        if not isinstance(tracker, Tracker):
            raise InvalidJobError(f"trackers has {tracker!r}; give objects of subclasses of rankzero.tracking.Tracker")


def pack(trackers: Sequence[Tracker], engine: Engine) -> dict[str, Any] | None:
    """Packs the trackers' pickles and the search path for their modules as JSON for the driver; None without trackers.

    Raises:
        InvalidJobError: a tracker cannot be pickled, or cannot work on this machine, where the driver will run.
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
