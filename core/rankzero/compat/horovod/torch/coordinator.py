"""`Coordinator`: collectives matched by name, in whatever order each rank issues them.

torch.distributed matches collectives by their order, Horovod by their names: the hooks of a backward pass fire in
another order on each rank. So ranks first agree, in rounds. In a round each rank sends what it has newly issued (an
all-gather of a small buffer); what all of them have issued is then carried out by all, in the same order, small
allreduces of one kind fused. A rank that waits for nothing joins no round, and the others wait for it in theirs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rankzero.compat.horovod.torch import execute
from rankzero.compat.horovod.torch.errors import HorovodInternalError, MismatchError, StallError
from rankzero.compat.horovod.torch.messages import (
    Handle,
    Meta,
    Numbers,
    Operation,
    Request,
    Said,
    aligned,
    full_name,
    inline_begin,
)
from rankzero.compat.horovod.torch.rounds import Received, Rounds

logger = logging.getLogger(__name__)

ROUND_PAUSE = 0.001
"""Seconds before the next round when one has agreed on nothing."""

DEADLOCK_ROUNDS = 2000
"""Rounds in which every rank waits, and for nothing that all have issued, before that is an error: some seconds."""

_JOINED, _SHUT_DOWN, _WAITING = 1, 2, 4


class Coordinator:
    """Of one set of ranks, in one rank. Its rounds are driven by whoever waits, and by a thread of its own."""

    def __init__(self, ranks: Sequence[int], timeout: timedelta, warn_after: float) -> None:
        """Makes the set's process groups. Every rank of the world must make them, members or not.

        Args:
            ranks: Global ranks of the set.
            timeout: After which an operation that some rank has not issued is an error.
            warn_after: Seconds after which it is a warning.
        """
        control = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
        # One for tensors on the CPU, and where there are GPUs another one for theirs.
        self._data = {"cpu": dist.new_group(list(ranks), timeout=timeout, backend="gloo")}
        if dist.get_backend() != "gloo":
            self._data["gpu"] = dist.new_group(list(ranks), timeout=timeout)
        self.ranks = list(ranks)
        me = dist.get_rank()
        self.rank = self.ranks.index(me) if me in self.ranks else -1
        """This rank's index in the set; -1 if it is no member."""
        self._rounds = Rounds(control, self.rank, len(ranks))
        self.warn_after = warn_after
        self._numbers = Numbers()
        self._calls: Counter[str] = Counter()
        self._issued: list[dict[str, Operation]] = [{} for _ in self.ranks]
        self._flags = [0] * len(self.ranks)
        self._requests: dict[str, Request] = {}
        self._new: list[Request] = []
        self._flag = 0
        self._joining: Handle | None = None
        self._last_joined = -1
        self._waiters = 0
        self._stuck_rounds = 0
        self._failed: HorovodInternalError | None = None
        self._mutex = threading.Lock()
        self._turn = threading.Lock()
        self._wanted = threading.Condition(self._mutex)
        self._thread: threading.Thread | None = None
        self._round_since: float | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def process_group(self, device: torch.device) -> Any:
        """torch's, for tensors of a device."""
        return self._data["cpu"] if device.type == "cpu" else self._data.get("gpu", self._data["cpu"])

    def count_call(self, kind: str) -> int:
        """The number of a call without a name, from 1."""
        self._calls[kind] += 1
        return self._calls[kind]

    # -- what callers do -----------------------------------------------------------------------

    def issue(self, request: Request) -> Handle:
        """Issues this rank's part of an operation; `wait` or `drive` carries it out.

        Raises:
            ValueError: the name is on its way already.
            HorovodInternalError: an earlier operation failed for good.
        """
        with self._mutex:
            if self._failed:
                raise self._failed
            name = request.full_name
            if name in self._requests:
                raise ValueError(
                    f"{request.meta.kind} of {name!r} was issued again before it had ended: synchronize it "
                    "first, or give each tensor a name of its own"
                )
            self._requests[name] = request
            self._new.append(request)
        return request.handle

    def drive(self) -> None:
        """Lets the coordinator's own thread carry out what was issued, while this one goes on."""
        with self._wanted:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rankzero-horovod", daemon=True)
                self._thread.start()
            self._wanted.notify()

    def wait(self, handle: Handle) -> torch.Tensor:
        """The result of an operation. Raises what it failed with."""
        with self._mutex:
            self._waiters += 1
        try:
            while not handle.is_done:
                with self._turn:
                    if not (handle.is_done or self._failed):
                        self._round()
                if self._failed and not handle.is_done:
                    # It failed while it was carried out.
                    handle.finish(error=self._failed)
        finally:
            with self._mutex:
                self._waiters -= 1
        if handle.error:
            raise handle.error
        result: torch.Tensor = handle.result
        return result

    def join(self) -> int:
        """Takes part in the others' allreduces, with zeros, until every rank is here; the rank that came last."""
        handle = Handle()
        with self._mutex:
            self._joining = handle
            self._flag |= _JOINED
        return int(self.wait(handle))

    def shut_down(self) -> None:
        """Says that this rank issues nothing more, and waits until all say so.

        What another rank still expects of this one fails there, at once.
        """
        if self.rank < 0 or self.size == 1:
            return
        with self._mutex:
            self._flag |= _SHUT_DOWN
        while not (self._failed or self._is_over()):
            with self._turn:
                if not (self._failed or self._is_over()):
                    self._round()

    def _is_over(self) -> bool:
        return all(flags & _SHUT_DOWN for flags in self._flags)

    def stall(self) -> float:
        """Seconds for which the present round has waited for a rank."""
        since = self._round_since
        return 0.0 if since is None else time.monotonic() - since

    def waiting_names(self) -> list[str]:
        """What this rank has issued and not got."""
        with self._mutex:
            return sorted(self._requests)

    # -- rounds --------------------------------------------------------------------------------

    def _has_work(self) -> bool:
        return bool(self._requests or self._joining)

    def _run(self) -> None:
        while not (self._failed or self._is_over()):
            with self._wanted:
                self._wanted.wait_for(self._has_work)
            with self._turn:
                if self._has_work() and not self._failed:
                    self._round()

    def _round(self) -> None:
        """One exchange, and what it makes possible. Needs `_turn`."""
        try:
            if self._failed:
                raise self._failed
            with self._mutex:
                new, self._new = self._new, []
                flags = self._flag | (_WAITING if self._waiters else 0)
            message = self._numbers.encode(flags, new)
            received = self._exchange(message)
            if self._reduced_at_once(new, message, received):
                return
            said = [self._numbers.decode(message) for message in received.messages]
            ready = self._agree(said)
            self._carry_out(ready, said, received)
            self._end_joins()
            self._look_for_stalls(said, bool(ready))
        except Exception as error:
            self._fail(error)
            return
        if not ready and self._requests:
            time.sleep(ROUND_PAUSE)

    def _exchange(self, message: bytes) -> Received:
        self._round_since = time.monotonic()
        try:
            return self._rounds.exchange(message)
        except RuntimeError as error:
            names = ", ".join(map(repr, self.waiting_names())) or "join()"
            raise StallError(
                f"rank {self.ranks[self.rank]} waits for {names}, but another rank has died, or has issued nothing "
                f"for {self.stall():.0f} s: {error}"
            ) from error
        finally:
            self._round_since = None

    def _reduced_at_once(self, new: Sequence[Request], message: bytes, received: Received) -> bool:
        """What most rounds are: all ranks send tiny tensors of the same names, known to all, and nothing else."""
        begin = inline_begin(message, (0, _WAITING))
        if not begin or any(other[:begin] != message[:begin] for other in received.messages):
            return False
        with self._mutex:
            for request in new:
                del self._requests[request.full_name]
        for request in new:
            execute.reduce_inline(request.meta, request, received.tensors(request.meta, (begin,) * self.size))
            begin += aligned(request.meta.inline_bytes)
        self._stuck_rounds = 0
        return True

    def _agree(self, said: Sequence[Said]) -> dict[str, list[Operation]]:
        """Names that every rank has issued, with what each rank issued; in the same order on all ranks."""
        touched: dict[str, None] = {}
        for index, message in enumerate(said):
            if message.flags & _JOINED and not self._flags[index] & _JOINED:
                self._last_joined = index
                touched.update(dict.fromkeys(name for issued in self._issued for name in issued))
            self._flags[index] = message.flags
            for operation in message.issued:
                name = full_name(self._numbers[operation[0]][0], operation[1])
                self._issued[index][name] = operation
                touched[name] = None
        active = [issued for issued, flags in zip(self._issued, self._flags, strict=True) if not flags & _JOINED]
        ready = [name for name in touched if active and all(name in issued for issued in active)]
        return {name: [issued.pop(name) for issued in self._issued if name in issued] for name in ready}

    def _carry_out(self, ready: dict[str, list[Operation]], said: Sequence[Said], received: Received) -> None:
        batch: list[tuple[Meta, Request]] = []
        for name, operations in ready.items():
            operation = operations[0]
            meta = self._numbers[operation[0]][1]
            request = self._taken(name, meta)
            if error := self._refusal(name, meta, operations):
                request.handle.finish(error=error)
            elif meta.kind != "allreduce":
                # The others' order is the order in which all ranks do it.
                execute.allreduce(self, batch)
                batch = []
                execute.run(self, meta, request)
            elif meta.inline_bytes and all(operation in message.inline for message in said):
                begins = tuple(message.inline[operation] for message in said)
                execute.reduce_inline(meta, request, received.tensors(meta, begins))
            else:
                batch.append((meta, request))
        execute.allreduce(self, batch)

    def _refusal(self, name: str, meta: Meta, operations: Sequence[Operation]) -> MismatchError | None:
        """Why the ranks cannot carry it out; the same on all of them."""
        if len(set(operations)) > 1:
            return MismatchError(self._mismatch(name, operations))
        joined = [rank for rank, flags in zip(self.ranks, self._flags, strict=True) if flags & _JOINED]
        fits = meta.kind == "barrier" or meta.op in (execute.AVERAGE, execute.SUM)
        if joined and not fits:
            return MismatchError(
                f"{name!r} needs something of rank {joined}, which has joined: only sums and averages go on"
            )
        return None

    def _taken(self, name: str, meta: Meta) -> Request:
        """This rank's part; zeros of a rank that has joined."""
        with self._mutex:
            request = self._requests.pop(name, None)
        return request or Request(name, 0, meta, execute.neutral(meta))

    def _mismatch(self, name: str, operations: Sequence[Operation]) -> str:
        parts = [
            f"rank {rank}: {self._numbers[number][1].describe()}"
            for rank, (number, _) in zip(self.ranks, operations, strict=False)
        ]
        return f"{name!r} is not the same on all ranks: {'; '.join(parts)}"

    def _end_joins(self) -> None:
        if all(flags & _JOINED for flags in self._flags):
            with self._mutex:
                joining, self._joining = self._joining, None
                self._flag &= ~_JOINED
                self._flags = [flags & ~_JOINED for flags in self._flags]
            if joining:
                joining.finish(self.ranks[self._last_joined])

    def _look_for_stalls(self, said: Sequence[Said], agreed: bool) -> None:
        """Raises StallError for what can never come; in the same round on every rank."""
        waiting = list(dict.fromkeys(name for issued in self._issued for name in issued))
        for name in waiting:
            missing = self._missing(name)
            ended = [self.ranks[index] for index in missing if self._flags[index] & _SHUT_DOWN]
            if ended:
                raise StallError(self._stalled(name, f"rank {ended} has ended without it"))
        is_stuck = waiting and not agreed and all(message.flags & (_WAITING | _JOINED) for message in said)
        self._stuck_rounds = self._stuck_rounds + 1 if is_stuck else 0
        if self._stuck_rounds > DEADLOCK_ROUNDS:
            raise StallError(
                "; ".join(
                    self._stalled(name, f"rank {[self.ranks[index] for index in self._missing(name)]} has not")
                    for name in waiting
                )
            )

    def _missing(self, name: str) -> list[int]:
        return [
            index
            for index, issued in enumerate(self._issued)
            if name not in issued and not self._flags[index] & _JOINED
        ]

    def _stalled(self, name: str, what: str) -> str:
        having = [rank for rank, issued in zip(self.ranks, self._issued, strict=True) if name in issued]
        return f"{name!r} was issued by rank {having}, but {what}"

    def _fail(self, error: Exception) -> None:
        with self._mutex:
            self._failed = error if isinstance(error, HorovodInternalError) else HorovodInternalError(str(error))
            waiting = [request.handle for request in self._requests.values()]
            waiting += [self._joining] if self._joining else []
            self._requests.clear()
            self._new.clear()
            self._joining = None
        for handle in waiting:
            handle.finish(error=self._failed)
