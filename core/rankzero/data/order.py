"""`Order`: maps each position of an epoch to a row of the dataset."""

from __future__ import annotations

import random

import torch

WHOLE_ROWS = 1 << 24
"""Most rows of a dataset that is shuffled as a whole: their order takes 128 MiB."""

WHOLE_BYTES = 256 << 20
"""Most bytes of a dataset that is shuffled as a whole: a reader keeps its share of them in memory."""

WINDOW_ROWS = 1 << 20
"""Most rows of a window of a larger dataset: their order takes 8 MiB, and several times as much while it is drawn."""

WINDOW_BYTES = 128 << 20
"""Most bytes of the rows of a window, which a reader keeps in memory."""

BLOCKS = 512
"""Number of blocks of adjacent rows that make up a window."""


class Order:
    """The order of one epoch: the order of the files, or a random one that depends only on dataset, seed and epoch.

    A dataset of up to `WHOLE_ROWS` and `WHOLE_BYTES` is one window and shuffled as a whole. A larger dataset is cut
    into several windows. Each window consists of `BLOCKS` random blocks of adjacent rows, and its rows are shuffled. A
    reader that keeps a window in memory so reads each row once, in contiguous pieces: a piece of one column has the
    bytes of a block divided by the number of columns. A disk reads a dataset of few columns about once, and one of a
    thousand columns about 6 times.

    Attributes:
        window: Number of positions of a window.
    """

    def __init__(self, rows: int, row_size: int, seed: int | None, epoch: int) -> None:
        """Prepares the order; random numbers are drawn when rows are requested.

        Args:
            rows: Number of rows of the dataset.
            row_size: Approximate number of bytes of a row.
            seed: Seed of the random order; None for the order of the files.
            epoch: Number of the epoch.
        """
        self._rows = rows
        self._seed = seed
        self._epoch = epoch
        self._is_whole = rows <= WHOLE_ROWS and rows * row_size <= WHOLE_BYTES
        self.window = rows if self._is_whole else max(1, min(rows, WINDOW_ROWS, WINDOW_BYTES // row_size))
        self._block = max(1, self.window // BLOCKS)
        self._drawn: dict[int, torch.Tensor] = {}
        self._blocks: torch.Tensor | None = None
        self._shift = 0 if seed is None or self._is_whole else random.Random(self._key(-2)).randrange(rows)

    def rows(self, low: int, high: int) -> torch.Tensor:
        """Returns the numbers of the rows at the positions ``low`` to ``high - 1``."""
        if self._seed is None:
            return torch.arange(low, high, device="cpu")
        found = []
        while low < high:
            window = low // self.window
            begin = window * self.window
            end = min(high, begin + self.window)
            found.append(self._rows_at(begin + self._in_window(window)[low - begin : end - begin]))
            low = end
        return torch.cat(found) if len(found) != 1 else found[0]

    def _rows_at(self, places: torch.Tensor) -> torch.Tensor:
        if self._is_whole:
            return places
        if self._blocks is None:
            self._blocks = self._permutation(-1, self._rows // self._block)
        number, within = places // self._block, places % self._block
        # The last rows, fewer than a block, are not moved; the shift selects different ones in each epoch.
        whole = number < len(self._blocks)
        moved = self._blocks[number.clamp(max=len(self._blocks) - 1)] * self._block + within
        return (torch.where(whole, moved, places) + self._shift) % self._rows

    def _in_window(self, window: int) -> torch.Tensor:
        if window not in self._drawn:
            size = min(self.window, self._rows - window * self.window)
            self._drawn = {window: self._permutation(window, size)}
        return self._drawn[window]

    def _permutation(self, what: int, size: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(random.Random(self._key(what)).getrandbits(63))
        return torch.randperm(size, generator=generator)

    def _key(self, what: int) -> str:
        return f"{self._seed} {self._epoch} {what}"
