"""`Epochs`: counts the epochs and batches of a loader or dataset, for checkpoints from which training resumes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankzero.data.shares import Stretch
    from rankzero.train.batches import Cut


@dataclass(eq=False)
class Position:
    """A position in an epoch, which an iteration moves.

    Attributes:
        epoch: Number of the epoch.
        done: Batches of this rank that were consumed. Those in ``consumed`` do not count.
        skipped: Number of them that the iteration skips.
        consumed: Parts of the epoch that were consumed before the iteration began, by worlds of any sizes.
        order: The part of a checkpoint's state that identifies the order of the rows.
        loader: State of the loader itself, with which the iteration begins.
        cut: Options of the iteration; None before it begins.
        alone: Whether a loader's own state is that of this position: no other iteration has begun before it ended, and
            none was left before it.
    """

    epoch: int
    done: int = 0
    skipped: int = 0
    consumed: list[Stretch] = field(default_factory=list)
    order: dict[str, Any] = field(default_factory=dict)
    loader: Any = None
    cut: Cut | None = None
    alone: bool = True

    def following(self, *, alone: bool = True) -> Position:
        """Returns the beginning of the next epoch."""
        return Position(self.epoch + 1, order=self.order, alone=alone)


class Epochs:
    """The epochs of a loader or dataset. Each iteration is a new epoch, except one within the loop of another one.

    Attributes:
        next: Position at which the next iteration begins.
    """

    def __init__(self) -> None:
        self.next = self._now = Position(0)
        self._live: set[Position] = set()

    @property
    def number(self) -> int:
        """Returns the number of the epoch that is running, was left before its end or, between two, comes next."""
        return self._now.epoch

    @property
    def is_running(self) -> bool:
        """Returns True if an iteration has begun that has not ended."""
        return bool(self._live)

    def start_at(self, position: Position) -> None:
        """Sets the position at which the next iteration begins."""
        self.next = self._now = position
        self._live.clear()

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration, which begins at its first batch unless it is the one that comes."""
        was_left = self._now is not self.next and self._now not in self._live
        at = self.next if epoch == self.next.epoch else Position(epoch, order=self.next.order)
        self.start_at(replace(at, alone=False) if was_left and at.epoch != self._now.epoch else at)

    def begin(self) -> Position:
        """Returns the position of an iteration that begins now."""
        at = self._now = self.next
        at.alone = True
        self.next = at.following()
        return at

    def count(self, at: Position, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches of an iteration, and moves its position.

        Args:
            at: The position that `begin` has returned.
            batches: The batches from this position on.
        """
        for other in self._live:
            other.alone = False
        self._live.add(at)
        try:
            for batch in batches:
                self._return_to(at)
                at.done += 1
                yield batch
            self._return_to(at)
        finally:
            self._live.discard(at)
        if self._now is at:
            self._now = at.following(alone=at.alone)

    def _return_to(self, at: Position) -> None:
        """Makes this position the current one again, after an iteration within its loop, which does not count."""
        if self._now is not at and at in self._live:
            self._now, self.next = at, at.following()

    def position(self) -> Position:
        """Returns the position for a checkpoint: the batch that comes next in the epoch that has begun.

        This holds for an epoch that the loop has left, too: a training that is to stop leaves the loop, and reports its
        last checkpoint behind it. `set_epoch` ends an epoch that is not to be continued.

        Raises:
            RuntimeError: an older iteration has not ended, and may be the one that continues.
        """
        at = self._now
        if older := self._live - {at}:
            other = min(older, key=lambda each: each.epoch)
            raise RuntimeError(
                f"the position is ambiguous: an iteration has had {other.done} batches of epoch {other.epoch} and has "
                "not ended, and another one has begun since. Take the state before the inner loop, delete an iterator "
                "that is no longer used, or iterate over another loader"
            )
        return at
