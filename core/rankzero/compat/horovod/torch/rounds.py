"""`Rounds`: the exchange of all ranks' messages in one round of a `Coordinator`.

`Turn` decides which thread of a rank runs the next round.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch

from rankzero.compat.horovod.torch.messages import Meta, aligned, length_of

SMALL = 1024
"""Bytes of a round's first buffer; longer messages are exchanged in a second one."""

KEPT = 64
"""Most cached views of tensors in a buffer: more than the tensors of a round that repeats."""


class Rounds:
    """An all-gather of short messages.

    Gloo's own collectives change threads twice on each rank, which takes longer than the messages do. Here the calling
    thread sends to ranks at distances of 1, 2, 4, ..., and each rank forwards the messages that it has (the
    dissemination of Bruck et al., "Efficient algorithms for all-to-all communications", 1997).
    """

    def __init__(self, process_group: Any, rank: int, size: int) -> None:
        self._group = process_group
        self._rank = rank
        self._size = size
        self._small = Received(rank, size, SMALL)
        self.number = 0
        """Number of the current round, from 1; the same on all ranks."""
        self.source = rank
        """Index of the rank from which this one receives."""

    def exchange(self, message: bytes) -> Received:
        """Exchanges the messages of all ranks. The result is valid until the next round. Raises RuntimeError."""
        self.number += 1
        self._gather(self._small, message)
        longest = max(map(length_of, self._small.messages))
        if longest <= SMALL:
            return self._small
        long = Received(self._rank, self._size, longest)
        self._gather(long, message)
        return long

    def _gather(self, received: Received, message: bytes) -> None:
        begin = message[: len(received.mine)]
        received.mine[: len(begin)] = begin
        for step, (to, outgoing, source, incoming) in enumerate(received.steps):
            self.source = source
            sending = self._group.send([outgoing], to, step)
            self._group.recv([incoming], source, step).wait()
            sending.wait()


class Received:
    """The messages of all ranks in a round, and the buffers in which they are exchanged.

    Attributes:
        messages: The messages by rank.
        mine: This rank's message among them.
        steps: For each distance the rank to send to, the buffer to send, the rank to receive from, and its buffer.
    """

    def __init__(self, rank: int, size: int, length: int) -> None:
        # The first row is this rank's, the second the next rank's, and so on.
        table = torch.zeros(size, aligned(length), dtype=torch.uint8, device="cpu")
        self._rows = [table[(other - rank) % size] for other in range(size)]
        self.messages = [_memory(row) for row in self._rows]
        self.mine = self.messages[rank]
        self._tensors: dict[tuple[Meta, tuple[int, ...]], list[torch.Tensor]] = {}
        self.steps = []
        distance = 1
        while distance < size:
            count = min(distance, size - distance)
            outgoing, incoming = table[:count], table[distance : distance + count]
            self.steps.append(((rank - distance) % size, outgoing, (rank + distance) % size, incoming))
            distance *= 2

    def tensors(self, meta: Meta, begins: tuple[int, ...]) -> list[torch.Tensor]:
        """Returns each rank's tensor, by rank, which starts at the given offset of its message."""
        found = self._tensors.get((meta, begins))
        if found is None:
            places = [slice(begin, begin + meta.inline_bytes) for begin in begins]
            found = [
                row[place].view(meta.torch_dtype).view(meta.shape)
                for row, place in zip(self._rows, places, strict=True)
            ]
            if len(self._tensors) == KEPT:
                # If each rank has a different order, the same offsets hardly repeat.
                del self._tensors[next(iter(self._tensors))]
            self._tensors[meta, begins] = found
        return found


def _memory(tensor: torch.Tensor) -> memoryview:
    # Works without numpy, which torch does not need. `_rows` keeps the memory as long as these views exist.
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class Turn:
    """A lock whose waiters also wake when they no longer need it. The caller of each method must hold the mutex.

    Args:
        mutex: Lock of the state that the conditions read.
    """

    def __init__(self, mutex: threading.Lock) -> None:
        self._changed = threading.Condition(mutex)
        self._is_taken = False
        self._sleepers = 0

    def take(self, is_needed: Callable[[], bool], may_begin: Callable[[], bool] | None = None) -> bool:
        """Waits for the turn, and releases the mutex meanwhile.

        Args:
            is_needed: Returns False if the caller no longer needs the turn.
            may_begin: Returns False if the caller does not need the turn yet; None: it always does.

        Returns:
            True if the turn was taken; then `give` must follow.
        """
        while is_needed():
            if not self._is_taken and (may_begin is None or may_begin()):
                self._is_taken = True
                return True
            self._sleepers += 1
            try:
                self._changed.wait()
            finally:
                self._sleepers -= 1
        return False

    def give(self) -> None:
        """Releases the turn, and wakes all waiters, some of which may no longer need it."""
        self._is_taken = False
        self.wake()

    def wake(self) -> None:
        """Makes all waiting threads check their conditions again."""
        if self._sleepers:
            self._changed.notify_all()
