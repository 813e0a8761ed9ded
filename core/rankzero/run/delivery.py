"""The delivery of a run's result: the receiver that it was offered to, and whether that has acknowledged it.

Until the acknowledgement, the next submission of the same training gets the result, since a receiver may die or its
orchestrator may fail to store the result. The file ``delivery`` of a submission records the receiver of its result.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from rankzero import store


@dataclass(frozen=True)
class Delivery:
    """Records the delivery of one submission's result.

    Attributes:
        receiver: Identifies the receiver to its orchestrator: JSON values by name. Empty if the result was not offered.
        acknowledged: True if the receiver has stored the result durably.
    """

    receiver: dict[str, Any] = field(default_factory=dict)
    acknowledged: bool = False


def read(folder: str) -> Delivery:
    """Returns the delivery of the result of the submission in a folder, which is empty if the result was not offered.

    Raises:
        OSError: the store cannot be read (or an error of its fsspec driver).
    """
    # A power failure may have emptied the file. The result is then delivered again.
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
        return Delivery(**json.loads(store.read_bytes(store.join(folder, "delivery"))))
    return Delivery()


def write(folder: str, delivery: Delivery) -> None:
    """Replaces the recorded delivery. Raises OSError (or an error of the store's fsspec driver)."""
    store.write_bytes(store.join(folder, "delivery"), json.dumps(asdict(delivery)).encode())
