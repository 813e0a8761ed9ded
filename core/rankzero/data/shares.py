"""Which positions of an epoch are a rank's, and how they are cut into batches. Pure functions of whole numbers.

An epoch is a line of positions, ``0 <= position < rows``; `rankzero.data.order` tells which row stands at each. Every
rank gets a stretch of the line, of the same length but for one row, and every rank the same number of batches: one that
has a batch less than its peers would leave them waiting in a collective for ever.

What has been consumed is a list of `Stretch`: with so many ranks so many batches. From it alone follows what is left,
for any other number of ranks, so that every row comes once in an epoch however often the world size changes in it.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

Spans = list[tuple[int, int]]
"""Positions: first, and behind the last."""


@dataclass(frozen=True)
class Batches:
    """How one rank's rows are cut.

    Attributes:
        own: Rows of this rank.
        count: Batches, the same for every rank.
        batch_size: Rows of a batch; the last ones may have fewer.
    """

    own: int
    count: int
    batch_size: int

    @staticmethod
    def of(total: int, world_size: int, rank: int, batch_size: int, *, drop_last: bool) -> Batches:
        """The batches of a rank, where all have ``total`` rows together."""
        low, high = split(total, world_size, rank)
        if drop_last:
            return Batches(high - low, total // world_size // batch_size, batch_size)
        most = -(-total // world_size)
        return Batches(high - low, -(-most // batch_size), batch_size)

    def done(self, count: int) -> int:
        """Rows of this rank in the first ``count`` batches.

        A rank with a row less than its peers may have none left for the last batch: then the one before it gives one
        up. Where that would be empty, too, the batch is: with fewer rows than batches there is no other way.
        """
        left = self.count - count if self.own >= self.count else 0
        return max(0, min(count * self.batch_size, self.own - left))


@dataclass(frozen=True)
class Stretch:
    """A part of an epoch that was consumed by a world of one size.

    Attributes:
        world_size: Number of ranks.
        batch_size: Rows of a batch.
        drop_last: Whether only whole batches were given.
        batches: How many every rank had.
    """

    world_size: int
    batch_size: int
    drop_last: bool
    batches: int

    def to_json(self) -> list[int]:
        """Plain JSON values."""
        return [int(value) for value in astuple(self)]

    @staticmethod
    def from_json(values: list[int]) -> Stretch:
        """The stretch from `to_json`."""
        world_size, batch_size, drop_last, batches = values
        return Stretch(world_size, batch_size, bool(drop_last), batches)


def split(total: int, world_size: int, rank: int) -> tuple[int, int]:
    """A rank's part of ``total``: first, and behind the last. Parts differ by one at most.

    Example:
        >>> [split(8, 3, rank) for rank in range(3)]
        [(0, 2), (2, 5), (5, 8)]
    """
    return total * rank // world_size, total * (rank + 1) // world_size


def length(spans: Spans) -> int:
    """Number of positions."""
    return sum(high - low for low, high in spans)


def cut(spans: Spans, begin: int, end: int) -> Spans:
    """The positions from the ``begin``-th to before the ``end``-th."""
    found: Spans = []
    before = 0
    for low, high in spans:
        first, last = max(low, low + begin - before), min(high, low + end - before)
        if first < last:
            found.append((first, last))
        before += high - low
    return found


def share(spans: Spans, world_size: int, rank: int) -> Spans:
    """A rank's part of the positions."""
    return cut(spans, *split(length(spans), world_size, rank))


def remaining(rows: int, consumed: list[Stretch]) -> Spans:
    """The positions of an epoch that are left after some were consumed, by worlds of any sizes.

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
    """The same positions, in as few spans as there can be."""
    found: Spans = []
    for low, high in spans:
        if found and found[-1][1] == low:
            found[-1] = (found[-1][0], high)
        else:
            found.append((low, high))
    return found
