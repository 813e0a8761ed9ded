"""`Agreement`: the operations that the ranks of a set have issued. All ranks receive the same, and decide the same.

`Rounds` exchanges all ranks' messages, one round after the other, and `Turn` decides which thread of a rank runs the
next round. `Requests` has the operations of one rank that have not finished.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rankzero.compat.horovod.torch import execute
from rankzero.compat.horovod.torch.errors import HorovodInternalError, MismatchError, StallError
from rankzero.compat.horovod.torch.execute import AVERAGE, SUM
from rankzero.compat.horovod.torch.messages import Handle, Meta, Report, Request, aligned, length_of

DEADLOCK_ROUNDS = 2000
"""Consecutive rounds (some seconds) in which all ranks wait for different operations before this is a deadlock."""

JOINED, SHUT_DOWN, WAITING = 1, 2, 4
"""Flags that a rank sends: it has joined, it issues no more operations, it waits for a result."""

NAMED = 5
"""Most operations that a message names."""

Issued = dict[int, Meta]
"""The operation that each rank has issued under one name, by index of the rank."""


SMALL = 1024
"""Bytes of a round's first buffer; longer messages are exchanged in a second one."""

KEPT = 64
"""Most cached views of tensors in a buffer: more than the tensors of a round that repeats."""


class Agreement:
    """A rank's record of the operations that all ranks of a set have issued.

    Args:
        ranks: Global ranks of the set.
        timeout: Seconds after which an operation that a rank has not issued is an error.
        warn_after: Seconds after which such an operation is logged as a warning, and between two warnings.
    """

    def __init__(self, ranks: Sequence[int], timeout: float, warn_after: float) -> None:
        self._ranks = ranks
        self._timeout = timeout
        self._warn_after = warn_after
        self._warn_at = 0.0
        self._first_issued: dict[str, float] = {}
        self._issued: dict[str, Issued] = {}
        self._flags = [0] * len(ranks)
        self._last_joined = -1
        self._stuck_rounds = 0

    @property
    def is_over(self) -> bool:
        """Returns True if no rank issues more operations."""
        return all(flags & SHUT_DOWN for flags in self._flags)

    def receive(self, reports: Sequence[Report]) -> dict[str, Issued]:
        """Records the reports of all ranks in a round.

        Returns:
            The operations that every rank has now issued, by name, in the same order on all ranks.
        """
        now = time.monotonic()
        touched: dict[str, None] = {}
        for index, message in enumerate(reports):
            if message.flags & JOINED and not self._flags[index] & JOINED:
                self._last_joined = index
                # Operations that waited only for that rank become ready.
                touched.update(dict.fromkeys(self._issued))
            self._flags[index] = message.flags
            for name, meta in message.issued.items():
                self._issued.setdefault(name, {})[index] = meta
                self._first_issued.setdefault(name, now)
                touched[name] = None
        ready = [name for name in touched if not self._missing(name)]
        for name in ready:
            del self._first_issued[name]
        return {name: self._issued.pop(name) for name in ready}

    def refusal(self, name: str, meta: Meta, issued: Issued) -> MismatchError | None:
        """Returns why the ranks cannot execute an operation that all have issued; None if they can."""
        if len(set(issued.values())) > 1:
            parts = [f"rank {self._ranks[index]}: {issued[index].describe()}" for index in sorted(issued)]
            return MismatchError(f"{name!r} is not the same on all ranks: {'; '.join(parts)}")
        joined = [rank for rank, flags in zip(self._ranks, self._flags, strict=True) if flags & JOINED]
        if joined and not (meta.kind == "barrier" or meta.op in (AVERAGE, SUM)):
            return MismatchError(
                f"{name!r} needs data of rank {joined}, which has joined: only sums and averages work without it"
            )
        return None

    def end_joins(self) -> int | None:
        """Returns the rank that joined last and resets the joins, once all ranks have joined; else None."""
        if not all(flags & JOINED for flags in self._flags):
            return None
        self._flags = [flags & ~JOINED for flags in self._flags]
        return self._ranks[self._last_joined]

    def check_stalls(self, reports: Sequence[Report], *, agreed: bool) -> str | None:
        """Checks for operations that some ranks do not issue.

        Returns:
            A warning about operations that are late, every ``warn_after`` seconds; else None.

        Raises:
            StallError: an operation can never become ready, which every rank detects in the same round; or it is late
                by more than the timeout.
        """
        for name in self._issued:
            if ended := [index for index in self._missing(name) if self._flags[index] & SHUT_DOWN]:
                raise StallError(self._stalled(name, ended, "has ended without it"))
        self._check_lost_joins()
        is_stuck = self._issued and not agreed and all(message.flags & (WAITING | JOINED) for message in reports)
        self._stuck_rounds = self._stuck_rounds + 1 if is_stuck else 0
        if self._stuck_rounds > DEADLOCK_ROUNDS:
            raise StallError(self._all_stalled(list(self._issued)))
        return self._check_late() if self._first_issued else None

    def _check_lost_joins(self) -> None:
        joined = [index for index, flags in enumerate(self._flags) if flags & JOINED]
        ended = [index for index, flags in enumerate(self._flags) if flags & SHUT_DOWN and not flags & JOINED]
        if joined and ended:
            raise StallError(f"rank {self._named(joined)} waits in join(), but rank {self._named(ended)} has ended")

    def _check_late(self) -> str | None:
        now = time.monotonic()
        if late := [name for name, since in self._first_issued.items() if now - since > self._timeout]:
            raise StallError(f"for {self._timeout:.0f} s {self._all_stalled(late)}")
        late = [name for name, since in self._first_issued.items() if now - since > self._warn_after]
        if not late or now < self._warn_at:
            return None
        self._warn_at = now + self._warn_after
        return f"for {now - self._first_issued[late[0]]:.0f} s {self._all_stalled(late)}"

    def _missing(self, name: str) -> list[int]:
        issued = self._issued[name]
        return [index for index, flags in enumerate(self._flags) if index not in issued and not flags & JOINED]

    def _all_stalled(self, names: Sequence[str]) -> str:
        more = f"; and {len(names) - NAMED} others" if len(names) > NAMED else ""
        return "; ".join(self._stalled(name, self._missing(name), "has not") for name in names[:NAMED]) + more

    def _stalled(self, name: str, missing: Sequence[int], what: str) -> str:
        having = self._named(sorted(self._issued[name]))
        return f"{name!r} was issued by rank {having}, but rank {self._named(missing)} {what}"

    def _named(self, indices: Sequence[int]) -> list[int]:
        return [self._ranks[index] for index in indices]


def listed(names: Sequence[str]) -> str:
    """Returns names as text for a message, at most `NAMED` of them."""
    more = f" and {len(names) - NAMED} others" if len(names) > NAMED else ""
    return ", ".join(map(repr, names[:NAMED])) + more


class Requests:
    """The unfinished operations of a rank, by name. Any thread may issue one; the thread that runs a round takes them.

    Args:
        mutex: Lock that each method holds.
    """

    def __init__(self, mutex: threading.Lock) -> None:
        self._mutex = mutex
        self._calls: Counter[str] = Counter()
        self._open: dict[str, Request] = {}
        self._new: list[Request] = []
        self.failed: HorovodInternalError | None = None
        """The error because of which no more operations can be issued."""

    def __bool__(self) -> bool:
        return bool(self._open)

    def count_call(self, kind: str) -> int:
        """Returns the number of a call without a name, from 1."""
        with self._mutex:
            self._calls[kind] += 1
            return self._calls[kind]

    def forget_calls(self) -> None:
        """Resets the numbers of calls without a name to 1."""
        with self._mutex:
            self._calls.clear()

    def issue(self, request: Request) -> Handle:
        """Adds an operation. Raises ValueError if one of its name has not finished, or an earlier failure's error."""
        with self._mutex:
            if self.failed:
                raise self.failed
            name = request.full_name
            if name in self._open:
                raise ValueError(
                    f"{request.meta.kind} of {name!r} was issued again before it had ended: synchronize it "
                    "first, or give each tensor its own name"
                )
            self._open[name] = request
            self._new.append(request)
        return request.handle

    def new(self) -> list[Request]:
        """Returns the operations that no round has sent to the other ranks yet, once."""
        with self._mutex:
            found, self._new = self._new, []
        return found

    def take(self, name: str, meta: Meta) -> Request:
        """Removes and returns the operation of a name that all ranks have issued; zeros if this rank has joined."""
        with self._mutex:
            request = self._open.pop(name, None)
        return request or Request(name, 0, meta, execute.neutral(meta))

    def remove(self, requests: Sequence[Request]) -> None:
        """Removes several operations that are being executed."""
        with self._mutex:
            for request in requests:
                del self._open[request.full_name]

    def names(self) -> list[str]:
        """Returns the sorted names of all operations."""
        with self._mutex:
            return sorted(self._open)

    def fail(self, error: HorovodInternalError) -> None:
        """Fails all operations with an error, also those that are issued later."""
        with self._mutex:
            self.failed = error
            waiting = [request.handle for request in self._open.values()]
            self._open.clear()
            self._new.clear()
        for handle in waiting:
            handle.finish(error=error)


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
