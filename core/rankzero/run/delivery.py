"""The delivery of a run's result: to whom it was offered, and whether the receiver has acknowledged it.

Until then the result belongs to whoever asks for it next: a receiver may die, or its orchestrator may fail to store
what it got. One file, ``delivery``, of the last submission whose result was offered.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from rankzero import store

_FILE = "delivery"


@dataclass(frozen=True)
class Delivery:
    """What is known of the delivery of one submission's result.

    Attributes:
        submission: Number of the submission.
        receiver: Who was offered the result, JSON values by name; what an orchestrator can be asked about later.
        acknowledged: The receiver has it for good.
    """

    submission: int
    receiver: dict[str, Any] = field(default_factory=dict)
    acknowledged: bool = False


def read(directory: str, submission: int) -> Delivery:
    """The delivery of a submission's result; nobody was offered it if there is no note.

    Raises:
        OSError: the store cannot be read (or an error of its fsspec driver).
    """
    # Emptied by a power failure it is as good as none: the result is delivered again.
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
        found = Delivery(**json.loads(store.read_bytes(store.join(directory, _FILE))))
        if found.submission == submission:
            return found
    return Delivery(submission)


def write(directory: str, delivery: Delivery) -> None:
    """Replaces the note. Raises OSError (or an error of the store's fsspec driver)."""
    store.write_bytes(store.join(directory, _FILE), json.dumps(asdict(delivery)).encode())
