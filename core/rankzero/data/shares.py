"""Divides the positions of an epoch among ranks, and cuts them into batches.

An epoch is a sequence of positions, ``0 <= position < rows``; `rankzero.data.order` maps each to a row. Every rank gets
a contiguous part; two parts differ by one row at most. Every rank has the same number of batches, since a rank with one
batch less would leave its peers blocked in a collective.

A list of `Stretch` describes the consumed part of an epoch: how many batches were consumed with which number of ranks.
The rest of the epoch follows from that list, for any number of ranks. Every row is therefore used once in an epoch,
however often the world size changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Spans = list[tuple[int, int]]
"""Ranges of positions: the first, and the last plus one."""


@dataclass(frozen=True)
class Batches:
    """The division of one rank's rows into batches.

    Attributes:
        own: Number of rows of this rank.
        count: Number of batches, the same for every rank.
        batch_size: Rows of a batch; the last ones may have fewer.
    """

    own: int
    count: int
    batch_size: int

    @staticmethod
    def of(total: int, world_size: int, rank: int, batch_size: int, *, drop_last: bool) -> Batches:
        """Returns the division for a rank, where all ranks together have ``total`` rows."""
        low, high = split(total, world_size, rank)
        if drop_last:
            return Batches(high - low, total // world_size // batch_size, batch_size)
        most = -(-total // world_size)
        return Batches(high - low, -(-most // batch_size), batch_size)

    def done(self, count: int) -> int:
        """Returns the number of this rank's rows in the first ``count`` batches.

        A rank with one row less than its peers may have no row for the last batch. It then moves one row there from the
        batch before. Only a rank with fewer rows than batches has empty batches.
        """
        left = self.count - count if self.own >= self.count else 0
        return max(0, min(count * self.batch_size, self.own - left))


@dataclass(frozen=True)
class Stretch:
    """A part of an epoch that was consumed by a world of one size.

    Attributes:
        world_size: Number of ranks.
        batch_size: Rows of a batch.
        drop_last: Whether a smaller last batch was left out.
        batches: Number of batches that every rank has consumed.
    """

    world_size: int
    batch_size: int
    drop_last: bool
    batches: int

    def to_json(self) -> list[Any]:
        """Returns the stretch as a list of plain JSON values."""
        return [int(self.world_size), int(self.batch_size), int(self.drop_last), int(self.batches)]

    @staticmethod
    def from_json(values: list[Any]) -> Stretch:
        """Returns the stretch from the values of `to_json`."""
        world_size, batch_size, drop_last, batches = values
        return Stretch(world_size, batch_size, bool(drop_last), batches)


def split(total: int, world_size: int, rank: int) -> tuple[int, int]:
    """Returns a rank's part of ``total``: the first index, and the last plus one. Parts differ by one at most.

    Example:
        >>> [split(8, 3, rank) for rank in range(3)]
        [(0, 2), (2, 5), (5, 8)]
    """
    return total * rank // world_size, total * (rank + 1) // world_size


def length(spans: Spans) -> int:
    """Returns the number of positions in spans."""
    return sum(high - low for low, high in spans)


def cut(spans: Spans, begin: int, end: int) -> Spans:
    """Returns the spans from the ``begin``-th position up to, but not including, the ``end``-th."""
    found: Spans = []
    before = 0
    for low, high in spans:
        first, last = max(low, low + begin - before), min(high, low + end - before)
        if first < last:
            found.append((first, last))
        before += high - low
    return found


def share(spans: Spans, world_size: int, rank: int) -> Spans:
    """Returns a rank's part of the positions in spans."""
    return cut(spans, *split(length(spans), world_size, rank))


def remaining(rows: int, consumed: list[Stretch]) -> Spans:
    """Returns the positions of an epoch that remain after worlds of any sizes have consumed parts of it.

    Example:
        >>> remaining(8, [Stretch(world_size=2, batch_size=3, drop_last=False, batches=1)])
        [(3, 4), (7, 8)]
    """
    spans: Spans = [(0, rows)] if rows else []
    for stretch in consumed:
        left: Spans = []
        for rank in range(stretch.world_size):
            mine, total = share(spans, stretch.world_size, rank), length(spans)
            batches = Batches.of(total, stretch.world_size, rank, stretch.batch_size, drop_last=stretch.drop_last)
            left += cut(mine, batches.done(stretch.batches), batches.own)
        spans = merged(left)
    return spans


def merged(spans: Spans) -> Spans:
    """Joins adjacent spans into as few spans as possible."""
    found: Spans = []
    for low, high in spans:
        if found and found[-1][1] == low:
            found[-1] = (found[-1][0], high)
        else:
            found.append((low, high))
    return found
