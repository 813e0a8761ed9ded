"""`Order`: which row stands at each position of an epoch."""

from __future__ import annotations

import random

import torch

WHOLE_ROWS = 1 << 24
"""Rows that are shuffled as a whole: their order takes 128 MiB."""

WHOLE_BYTES = 256 << 20
"""Bytes of rows that are shuffled as a whole: a reader holds its share of them in memory."""

WINDOW_ROWS = 1 << 20
"""Rows of a window of what is larger: their order takes 8 MiB, and several times that while it is drawn."""

WINDOW_BYTES = 128 << 20
"""Bytes of the rows of a window: a reader holds them in memory."""

BLOCKS = 512
"""Places of the dataset from which the rows of a window come."""


class Order:
    """The order of one epoch: that of the files, or a random one that depends on nothing but dataset, seed and epoch.

    A dataset of up to `WHOLE_ROWS` and `WHOLE_BYTES` is shuffled as a whole: it is one window. A larger one is cut into
    several. The rows of each come as blocks, of neighbours in the files, from `BLOCKS` random places, and are shuffled
    among each other; so a reader that holds a window reads each row once, in pieces that a disk is good at: of a column
    the bytes of a block over the number of columns, so that a disk reads a few columns about once, and a thousand some
    6 times.

    Attributes:
        window: Positions of a window.
    """

    def __init__(self, rows: int, row_size: int, seed: int | None, epoch: int) -> None:
        """Draws nothing yet.

        Args:
            rows: Of the dataset.
            row_size: Bytes of a row, about.
            seed: Of the random orders; None for that of the files.
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
        """The rows at the positions from ``low`` to before ``high``."""
        if self._seed is None:
            return torch.arange(low, high)
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
        # The last rows, fewer than a block, keep their place; the shift makes them others in each epoch.
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
