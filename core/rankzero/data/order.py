"""`Order`: maps the positions of an epoch to rows: windows of row groups from everywhere, shuffled inside.

The row groups of a dataset are drawn in a random order, some of them make a window, and the rows of a window are
shuffled: a table that is sorted by a column trains as well as a shuffled one if its row groups are small, as those
that rankzero writes. A reader decodes one window at a time, so each row group is decoded once in an epoch. One that is
larger than a window is decoded in pieces, in several windows. A dataset of one window is shuffled as a whole.
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
"""Row groups of rankzero's own size in a window. One that is read in order is decoded in pieces of that size."""

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


def pieces_of(manifest: Manifest, *, ordered: bool = False) -> list[list[Piece]]:
    """Returns the pieces of each row group of a dataset that has rows, in the order of the files.

    Args:
        manifest: The dataset.
        ordered: Whether the pieces are read in the order of the files, so that one group is decoded at a time.
    """
    most = max(1, WINDOW // row_size(manifest) // (GROUPS if ordered else 1))
    found = []
    for group, rows in enumerate(count for file in manifest.files for count in file.rows):
        step = max(1, rows if 2 * rows <= 3 * most else most)
        found.append([Piece(group, low, min(step, rows - low), step) for low in range(0, rows, step)])
    return [pieces for pieces in found if pieces]


def windows_of(manifest: Manifest) -> int:
    """Returns the number of windows of a dataset."""
    return max(1, -(-manifest.rows * row_size(manifest) // WINDOW))


def row_size(manifest: Manifest) -> int:
    """Returns the approximate number of bytes of a row, with those of its place in an order."""
    return max(LEAST, manifest.row_size)


class Order:
    """The random order of one epoch, which depends only on the dataset, the seed and the epoch."""

    def __init__(self, manifest: Manifest, seed: int, epoch: int) -> None:
        """Divides the dataset into windows; the order of each is drawn when its rows are requested."""
        self._seed = seed
        self._epoch = epoch
        groups = pieces_of(manifest)
        if (count := windows_of(manifest)) > 1:
            groups = [groups[number] for number in self._permutation(-1, len(groups)).tolist()]
        self._windows = _dealt(groups, count)
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


def _dealt(groups: list[list[Piece]], count: int) -> list[list[Piece]]:
    """Returns so many windows, to which the pieces of the groups are dealt one after the other.

    No window has two pieces of a group if there are as many windows, and those of a group keep their order.
    """
    windows: list[list[Piece]] = [[] for _ in range(count)]
    dealt = 0
    for pieces in groups:
        places = sorted((dealt + number) % count for number in range(len(pieces)))
        for piece, place in zip(pieces, places, strict=True):
            windows[place].append(piece)
        dealt += len(pieces)
    return [window for window in windows if window]
