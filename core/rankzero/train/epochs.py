"""`Epochs`: counts the epochs and batches of a loader or dataset, for checkpoints from which training resumes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class Position:
    """A position in an epoch, which an iteration moves.

    Attributes:
        epoch: Number of the epoch.
        loaded: State of the checkpoint at which the iteration begins; None for the beginning of the epoch.
        done: Batches of this iteration that were consumed.
        data: The data of the iteration; None before it begins.
    """

    epoch: int = 0
    loaded: Mapping[str, Any] | None = None
    done: int = 0
    data: Any = None


class Epochs:
    """The epochs of a loader or dataset: each iteration is a new one."""

    def __init__(self) -> None:
        self._at = Position()

    @property
    def epoch(self) -> int:
        """Returns the number of the epoch that is running, was left before its end or, between two, comes next."""
        return self._at.epoch

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration. Optional: each iteration increases the epoch by one.

        A position that was loaded belongs to its epoch: that one is resumed, any other epoch begins at its first batch.
        """
        if epoch != self._at.epoch or self._at.data is not None:
            self._at = Position(epoch)

    def _begin(self, data: Any) -> Position:
        """Returns the position of an iteration over some data that begins now."""
        if self._at.data is not None:
            # The loop has left its epoch.
            self._at = Position(self._at.epoch + 1)
        self._at.data = data
        return self._at

    def _count(self, at: Position, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches of an iteration, and moves its position."""
        for batch in batches:
            at.done += 1
            # A loop within the loop, such as an evaluation, does not count.
            self._at = at
            yield batch
        self._at = Position(at.epoch + 1)
