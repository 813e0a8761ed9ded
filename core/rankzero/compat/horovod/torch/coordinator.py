"""`Coordinator`: matches operations by name, in whatever order each rank issues them, and executes them in one order.

torch.distributed matches collectives by their order, Horovod by their names, since the hooks of a backward pass fire in
a different order on each rank. Each process set therefore has a thread, which alone uses the set's connections. In each
cycle the threads all-gather a small message: the operations that a rank has issued since the last cycle, with all that
must be equal. So every rank keeps the same table, finds the same operations ready, and executes them in its order. A
rank without operations sleeps, and the others wait in their all-gather, since nothing can become ready without it.
"""

# ruff: noqa: I001 (packed imports)
from __future__ import annotations

import contextlib
import math
import pickle
import queue
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rankzero.bounds import stretched
from rankzero.compat.horovod.torch.operations import (
    AVERAGE, MAX, MIN, PRODUCT, SUM, Connections, HorovodInternalError, Meta, MismatchError, Request, StallError,
)  # fmt: skip

JOIN = "join.all"
"""The operation that ranks in ``join()`` wait for. A rank that has issued it adds zeros to the sums of others."""

TICK = 1.0
"""Seconds after which an idle rank takes part in a cycle, so that others receive its state."""

PAUSE = 0.005
"""Longest pause in seconds between cycles in which nothing was issued; it grows by a thousandth of the time waited."""

ROLL_CALL = stretched(5.0)
"""Seconds that a rank waits for the others' accounts of a lost connection; longer than `TICK`."""

_OF_NUMBERS: dict[str, Callable[[list[float]], float]] = {
    AVERAGE: lambda numbers: sum(numbers) / len(numbers), SUM: sum, MIN: min, MAX: max, PRODUCT: math.prod,
}  # fmt: skip


class Coordinator:
    """The thread of a process set. It is a daemon, but `close` joins it before Python finalizes.

    ``number`` counts the sets of the process, the same on all ranks. An operation that another rank has not issued
    is named by a line every ``warn_after`` seconds, and an error after ``timeout`` seconds.
    """

    def __init__(self, number: int, ranks: Sequence[int], warn_after: float, timeout: float) -> None:
        self.ranks, self.size, me = list(ranks), len(ranks), dist.get_rank()
        self.rank = self.ranks.index(me) if me in self.ranks else -1
        """Index of this rank in the set; -1 if it is not a member."""
        self._device = torch.device("cuda")
        """The GPU of this rank's operations: another thread has another current one."""
        self._timeout, self._warn_after, self._warned = timeout, warn_after, 0.0
        self._store = distributed_c10d.PrefixStore(f"rankzero/hvd/{number}", distributed_c10d._get_default_store())
        self._connections = Connections(self._store, self.rank, self.ranks, timeout + 10 * TICK)
        self._queue: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        """What callers have issued; None at the end."""
        if self.rank < 0:
            return
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._calls: dict[str, int] = {}
        self._mine: dict[str, Request] = {}
        """The operations of this rank that have not ended."""
        self._memory: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
        """The places of the tensors of operations that have not ended, by storage."""
        self._table: dict[str, dict[int, tuple[Sequence[Meta], float | None]]] = {}
        """The operations that are not ready, with what each rank has announced; the same on all ranks."""
        self._ended: set[int] = set()
        self._has_ended, self._quiet_since = False, 0.0
        self._runs = threading.Lock()
        self._runs.acquire()
        self._thread = threading.Thread(target=self._run, name="rankzero-horovod", daemon=True)
        self._thread.start()

    def issue(self, kind: str, name: str | None, *args: Any) -> Request:
        """Gives a `Request` to the thread; its name is the user's, or the number of the call without a name.

        Raises ValueError for no member, and for a name or memory in use, HorovodInternalError after a failure.
        """
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is no member of the process set of ranks {self.ranks}")
        with self._lock:
            if name is None:
                self._calls[kind] = self._calls.get(kind, 0) + 1
                name = f"noname.{self._calls[kind]}"
            request = Request(f"{kind}.{name}", *args)
            self._device = next((tensor.device for tensor in request.tensors if tensor.is_cuda), self._device)
            if self._error is not None:
                raise type(self._error)(*self._error.args) from self._error
            if not self._thread.is_alive():
                raise HorovodInternalError("a process that a rank has forked takes no part in its operations")
            if request.name in self._mine:
                raise ValueError(f"{request.name!r} was issued again before it has ended: wait, or use another name")
            for storage, (first, last, use) in request.memory:
                if any(first < end and start < last and use != other for start, end, other in self._memory[storage]):
                    raise ValueError(f"{request.name!r} shares memory with one that has not ended: wait for that first")
            self._mine[request.name] = request
            for storage, place in request.memory:
                self._memory[storage].append(place)
            self._queue.put(request)
        return request

    def join(self) -> int:
        """Adds zeros to sums of other ranks until all have joined; returns the rank that joined last."""
        if self._device.index is None and torch.cuda.is_initialized():
            self._device = torch.device("cuda", torch.cuda.current_device())
        joined = self.issue(*JOIN.split("."), [Meta("join")], [])
        joined.wait()
        return self.ranks[joined.rows[0][-1]]

    def end(self) -> None:
        """Announces that this rank issues no more operations; those for which others still wait fail there."""
        self._queue.put(None)

    def close(self) -> None:
        """Waits until all ranks have ended or one has failed, and closes the connections."""
        if self.rank >= 0:
            # Waits here, where a rank counts as one that waits for others.
            with self._runs:
                self._thread.join()
        self._connections.close(is_failed=False)

    # In which the tensors of each mode can be written to.
    @torch.inference_mode()
    def _run(self) -> None:
        try:
            while self._cycle():
                pass
            failed = HorovodInternalError("Horovod has been shut down")
        except HorovodInternalError as error:
            # All ranks raise it in the same cycle.
            failed = error
        except Exception as error:
            failed = HorovodInternalError(self._account(error))
            failed.__cause__ = error
        with self._lock:
            self._error, found = failed, list(self._mine.values())
            self._mine.clear()
        for request in found:
            request.end(failed)
        if failed.__cause__ is not None:
            traceback.clear_frames(failed.__cause__.__traceback__)
            self._connections.close(is_failed=True)
        self._runs.release()

    def _account(self, error: Exception) -> str:
        """Returns what has failed, in this rank or in others. The store has each rank's account of it."""
        is_lost = isinstance(error, RuntimeError) and "gloo" in str(error)
        mine = "" if is_lost else f"rank {self.ranks[self.rank]} failed: {type(error).__name__}: {error}"
        # Rank 0 has the store.
        keys, accounts, silent = [f"account/{rank}" for rank in range(self.size)], [mine], [0]
        with contextlib.suppress(RuntimeError):
            self._store.set(keys[self.rank], mine)
            if is_lost:
                with contextlib.suppress(RuntimeError):
                    self._store.wait(keys, timedelta(seconds=ROLL_CALL()))
                found = [key for key in keys if self._store.check([key])]
                silent = [rank for rank, key in zip(self.ranks, keys, strict=True) if key not in found]
                accounts = [self._store.get(key).decode() for key in found]
        what = "; ".join(filter(None, accounts)) or (f"rank {silent} has died" if silent else str(error))
        waits = ", ".join([repr(name) for name in list(self._mine)[:5]])
        return f"{what}, while rank {self.ranks[self.rank]} waited for {waits or 'others'}"

    def _receive(self) -> list[Request]:
        """Returns what callers have issued; waits for it as long as this rank's state allows."""
        quiet = time.monotonic() - self._quiet_since if self._quiet_since else 0.0
        timeout = min(quiet / 10, PAUSE + quiet / 1000, TICK) if self._mine or self._has_ended else TICK
        found: list[Request | None] = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._queue.get(timeout > 0, timeout or None))
                timeout = 0.0
        self._has_ended = self._has_ended or None in found
        return [one for one in found if one is not None]

    def _cycle(self) -> bool:
        """Exchanges a message, and executes what is ready. Returns False once all ranks have ended."""
        issued, now = self._receive(), time.monotonic()
        # A rank may join long before the last one does.
        stalled = [one.since for one in list(self._mine.values()) if one.name in self._table.keys() - {JOIN}]
        announced = [(one.name, one.metas, one.number()) for one in issued]
        message = self._has_ended, now - min(stalled, default=now) > self._timeout, announced
        found = [pickle.loads(each) for each in self._connections.gather(pickle.dumps(message))]
        for rank, (has_ended, _, operations) in enumerate(found):
            if has_ended:
                self._ended.add(rank)
            for name, *facts in operations:
                self._table.setdefault(name, {})[rank] = facts
        if any(is_expired for _, is_expired, _ in found):
            lacking = [self._lacking(name) for name in sorted(self._table.keys() - {JOIN})]
            raise StallError(f"for {self._timeout:g} s {'; '.join(lacking[:5])}")
        self._quiet_since = 0.0 if any(operations for *_, operations in found) else self._quiet_since or now
        self._execute()
        if self._quiet_since and self._mine:
            self._warn(now)
        return len(self._ended) < self.size

    def _execute(self) -> None:
        """Executes operations that all ranks have issued, or have joined or ended without."""
        away = self._ended | self._table.get(JOIN, {}).keys()
        ready: list[Request] = []
        for name, of in list(self._table.items()):
            if len(of) < self.size and len(of.keys() | (self._ended if name == JOIN else away)) < self.size:
                continue
            del self._table[name]
            request, error = self._mine.get(name), self._refusal(name, of)
            if request is None and error is None:
                # This rank has joined.
                metas, _ = of[min(of)]
                request = Request(name, metas, [meta.zeros(self._device) for meta in metas])
            if request is None:
                continue
            numbers = [of[rank][1] for rank in sorted(of)]
            if error is not None:
                self._end(request, error)
            elif name == JOIN:
                # Ranks that joined early have made fewer calls without a name.
                self._calls.clear()
                request.rows.append(list(of))
                self._end(request)
            elif len(numbers) == self.size and None not in numbers:
                self._reduce(request, numbers)
            else:
                ready.append(request)
        self._connections.execute(ready, self._end)

    def _reduce(self, request: Request, numbers: Sequence[Any]) -> None:
        """Reduces the numbers of all ranks, which each has received, in the same order on each."""
        meta, tensor = request.metas[0], request.tensors[0]
        found = _OF_NUMBERS[meta.op]([number * meta.before for number in numbers]) * meta.after
        # As with several elements, a number that is too large for the type is infinite.
        tensor.copy_(torch.tensor(found, dtype=torch.float64, device="cpu"))
        self._end(request)

    def _end(self, request: Request, error: Exception | None = None) -> None:
        """Gives a request its end; its name can be used again. A request whose events cannot be recorded stays."""
        with self._lock:
            request.end(error)
            if self._mine.pop(request.name, None) is not None:
                for storage, place in request.memory:
                    self._memory[storage].remove(place)
            if not self._mine:
                self._memory.clear()

    def _refusal(self, name: str, of: dict[int, Any]) -> Exception | None:
        """Returns the error of an operation that differs between ranks, or that some lack; None if it is executed."""
        first, *others = (metas for metas, _ in of.values())
        if any(other != first for other in others):
            gave = {self.ranks[rank]: ", ".join(map(str, of[rank][0])) for rank in sorted(of)}
            parts = "; ".join(f"rank {rank}: {metas}" for rank, metas in gave.items())
            return MismatchError(f"{name!r} is not the same on all ranks: {parts}")
        missing = [rank for rank in range(self.size) if rank not in of]
        if gone := [self.ranks[rank] for rank in missing if rank in self._ended]:
            has = [self.ranks[rank] for rank in sorted(of)]
            return StallError(f"{name!r} was issued by rank {has}, but rank {gone} has ended without it")
        if not missing or all(meta.kind == "barrier" or meta.op in (SUM, AVERAGE) for meta in first):
            return None
        joined = [self.ranks[rank] for rank in missing]
        return MismatchError(f"{name!r}: rank {joined} has joined, which only sums and averages allow: {first[0]}")

    def _lacking(self, name: str) -> str:
        has = [self.ranks[at] for at in sorted(self._table[name])]
        lacks = [rank for rank in self.ranks if rank not in has]
        return f"{name!r} was issued by rank {has}, but rank {lacks} has not"

    def _warn(self, now: float) -> None:
        late = [one for one in [*self._mine.values()] if one.name in self._table and now - one.since > self._warn_after]
        if late and now - self._warned > self._warn_after:
            self._warned = now
            names = "; ".join(self._lacking(one.name) for one in late[:5])
            waited = now - min(one.since for one in late)
            print(f"rankzero: rank {self.ranks[self.rank]} has waited {waited:.0f} s: {names}", flush=True)
