"""`Order`: maps the positions of an epoch to rows: windows of row groups from everywhere, shuffled inside.

The row groups of a dataset are drawn in a random order, `GROUPS` of them make a window, and the rows of a window are
shuffled: a table that is sorted by a column trains as well as a shuffled one. A reader decodes one window at a time, so
each row group is decoded once in an epoch. A row group that is too large for that is decoded in pieces: one after the
other, each in a window with pieces of other groups. A dataset that fits into one window is shuffled as a whole.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from rankzero.data.manifest import Manifest
    from rankzero.data.shares import Spans

WINDOW = 128 << 20
"""Approximate number of bytes of a window, which a reader keeps in memory."""

GROUPS = 32
"""Fewest row groups from which a window draws, if the dataset has as many."""

LEAST = 32
"""Bytes that a row counts at least, since the order of a window takes memory, too."""


class Piece(NamedTuple):
    """A row group, or adjacent rows of one that is too large to be decoded as a whole.

    Attributes:
        group: Number of the row group in the dataset.
        low: The first row, counted in the group.
        length: Number of rows.
        step: Number of rows of each piece of the group but the last.
    """

    group: int
    low: int
    length: int
    step: int


def pieces_of(manifest: Manifest) -> list[list[Piece]]:
    """Returns the pieces of each row group of a dataset that has rows, in the order of the files."""
    rows = [count for file in manifest.files for count in file.rows]
    size = WINDOW // min(GROUPS, max(1, len(rows)))
    found = []
    for group, count in enumerate(rows):
        parts = -(-count * _row_size(manifest) // size) if 2 * count * _row_size(manifest) > 3 * size else 1
        step = -(-count // parts)
        lows = range(0, count, max(1, step))
        found.append([Piece(group, low, min(step, count - low), step) for low in lows])
    return [pieces for pieces in found if pieces]


def _row_size(manifest: Manifest) -> int:
    return max(LEAST, manifest.row_size)


class Order:
    """The random order of one epoch, which depends only on the dataset, the seed and the epoch."""

    def __init__(self, manifest: Manifest, seed: int, epoch: int) -> None:
        """Divides the dataset into windows; the order of each is drawn when its rows are requested."""
        self._seed = seed
        self._epoch = epoch
        groups = pieces_of(manifest)
        if manifest.rows * _row_size(manifest) <= WINDOW:
            self._windows = [list(itertools.chain.from_iterable(groups))]
        else:
            drawn = self._permutation(-1, len(groups)).tolist()
            self._windows = list(_windows([groups[number] for number in drawn], max(1, WINDOW // _row_size(manifest))))
        self._starts = [0, *itertools.accumulate(sum(piece.length for piece in window) for window in self._windows)]

    def parts(self, spans: Spans) -> Iterator[tuple[list[Piece], torch.Tensor]]:
        """Yields each window with rows at these ascending positions, and the numbers of these rows in the window."""
        cut: dict[int, list[tuple[int, int]]] = {}
        for low, high in spans:
            while low < high:
                number = bisect.bisect_right(self._starts, low) - 1
                end = min(high, self._starts[number + 1])
                cut.setdefault(number, []).append((low - self._starts[number], end - self._starts[number]))
                low = end
        for number, places in cut.items():
            rows = self._permutation(number, self._starts[number + 1] - self._starts[number])
            yield self._windows[number], torch.cat([rows[low:high] for low, high in places])

    def _permutation(self, what: int, size: int) -> torch.Tensor:
        key = random.Random(f"{self._seed} {self._epoch} {what}").getrandbits(63)
        return torch.randperm(size, generator=torch.Generator("cpu").manual_seed(key), device="cpu")


def _windows(groups: list[list[Piece]], rows: int) -> Iterator[list[Piece]]:
    """Yields windows of about so many rows: the first piece of each of some groups, then the second of each, ..."""
    drawn: list[list[Piece]] = []
    total = 0
    for number, pieces in enumerate(groups, 1):
        drawn.append(pieces)
        total += pieces[0].length
        # The last groups are no window of their own, unless rows are large.
        is_full = total >= rows and len(drawn) >= GROUPS and len(groups) - number >= GROUPS
        if is_full or total >= 2 * rows or number == len(groups):
            for round_ in itertools.zip_longest(*drawn):
                yield [piece for piece in round_ if piece is not None]
            drawn, total = [], 0
