"""`Coordinator`: matches operations by name, in whatever order each rank issues them, and begins them in one order.

torch.distributed matches collectives by their order, Horovod by their names, since the hooks of a backward pass fire in
a different order on each rank. Each process set therefore has a thread, which alone uses the set's connections. In each
cycle the threads all-gather a small message: for every operation that a rank has issued since the last cycle a hash of
its name and one of everything that must be equal. So every rank keeps the same table and finds the same operations
ready. Names and shapes travel only for errors and for ranks that have joined. The thread begins what is ready, and the
callers wait for it. A rank without operations sleeps, and the others wait in their all-gather, since nothing can become
ready without it.

Horovod itself exchanges a bit vector of known names. An all-reduce (MIN) of it takes as long as this all-gather on two
ranks, and 1.4 to 1.6 times as long on four; a name that is new, or a call without a name, would need a second message.
"""

# ruff: noqa: I001 (packed imports)
from __future__ import annotations

import array
import contextlib
import pickle
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rankzero.bounds import stretched
from rankzero.compat.horovod.torch.connections import Connections
from rankzero.compat.horovod.torch.requests import (
    AVERAGE, SUM, HorovodInternalError, Meta, MismatchError, Request, StallError, hashes, of_numbers,
)  # fmt: skip

JOINED, ENDED, EXPIRED = 1, 2, 4
"""What a message announces of its rank, beside operations."""

CAPACITY = 32
"""Operations that one message announces; further ones follow in the next cycle."""

TICK = 1.0
"""Seconds after which an idle rank takes part in a cycle, so that others receive its state."""

PAUSE = 0.005
"""Longest pause in seconds between cycles in which nothing was issued; it grows by a thousandth of the time waited."""

ROLL_CALL = stretched(5.0)
"""Seconds that a rank waits for the others' accounts of a lost connection; longer than `TICK`."""


class Coordinator:
    """The thread of a process set. It is a daemon, but `close` joins it before Python finalizes.

    ``number`` counts the sets of the process, the same on all ranks. An operation that another rank has not issued
    is named by a line every ``warn_after`` seconds, and an error after ``timeout`` seconds.
    """

    def __init__(self, number: int, ranks: Sequence[int], timeout: float, warn_after: float) -> None:
        self.ranks, self.size, me = list(ranks), len(ranks), dist.get_rank()
        self.rank = self.ranks.index(me) if me in self.ranks else -1
        """Index of this rank in the set; -1 if it is not a member."""
        self._device = torch.device("cuda")
        """The GPU of this rank's operations: another thread has another current one."""
        self._timeout, self._warn_after, self._warned = timeout, warn_after, 0.0
        self._store = distributed_c10d.PrefixStore(f"rankzero/hvd/{number}", distributed_c10d._get_default_store())
        self._connections = Connections(self._store, self.rank, self.ranks, timeout + 10 * TICK)
        if self.rank < 0:
            return
        self._error: Exception | None = None
        self._queue: queue.SimpleQueue[Request | int | tuple[Exception, str]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._calls: dict[str, int] = {}
        self._mine: dict[int, Request] = {}
        """The operations of this rank that have not begun."""
        self._begun: dict[int, Request] = {}
        """Those that have begun; until they are complete their names are taken."""
        self._users: weakref.WeakValueDictionary[int, Request] = weakref.WeakValueDictionary()
        """The operation that this rank has announced last on each memory."""
        self._unsent: list[Request] = []
        self._table: dict[int, dict[int, tuple[int, int]]] = {}
        """For each operation that is not ready, the digest and the payload of each rank that has issued it."""
        self._flags, self._all_flags, self._lost = 0, [0] * self.size, list[str]()
        self._quiet_since, self._last = 0.0, 0
        self._row = array.array("q", bytes(8 * (2 + 3 * CAPACITY)))
        self._rows = self._row * self.size
        self._buffers = [torch.frombuffer(each, dtype=torch.int64) for each in (self._rows, self._row)]
        self._runs = threading.Lock()
        self._runs.acquire()
        self._thread = threading.Thread(target=self._run, name="rankzero-horovod", daemon=True)
        self._thread.start()

    def issue(self, kind: str, name: str | None, *args: Any) -> Request:
        """Gives a `Request` to the thread; its name is the user's, or the number of the call without a name.

        Raises ValueError if this rank is not a member, or if an operation of this name is not complete, and
        HorovodInternalError if an earlier operation has failed.
        """
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is no member of the process set of ranks {self.ranks}")
        with self._lock:
            if name is None:
                self._calls[kind] = self._calls.get(kind, 0) + 1
                name = f"noname.{self._calls[kind]}"
        request = Request(f"{kind}.{name}", *args)
        request.failed = self._failed
        for tensor in request.tensors:
            self._device = tensor.device if tensor.is_cuda else self._device
        with self._lock:
            if self._error is not None:
                raise type(self._error)(*self._error.args) from self._error
            if not self._thread.is_alive():
                raise HorovodInternalError("a process that a rank has forked takes no part in its operations")
            taken = self._mine.get(request.key) or self._begun.get(request.key)
            if taken and not taken.is_completed():
                raise ValueError(f"{request.name!r} was issued again before it has ended: wait, or use another name")
            self._mine[request.key] = request
            self._queue.put(request)
        return request

    def join(self) -> int:
        """Adds zeros to sums of other ranks until all have joined; returns the rank that joined last."""
        if self._device.index is None and torch.cuda.is_initialized():
            self._device = torch.device("cuda", torch.cuda.current_device())
        joined = self.issue("join", "", [], [])
        self._queue.put(JOINED)
        joined.wait()
        return self.ranks[self._last]

    def end(self) -> None:
        """Announces that this rank issues no more operations; those for which others still wait fail there."""
        if self.rank >= 0:
            self._queue.put(ENDED)

    def close(self) -> None:
        """Waits until all ranks have ended or one has failed, and closes the connections."""
        if self.rank >= 0:
            # Waits here, where a rank counts as one that waits for others.
            with self._runs:
                self._thread.join()
        self._connections.close(is_failed=False)

    def _failed(self, error: Exception, name: str) -> Exception:
        """Ends the operations of all ranks since a collective of this rank has failed. Returns their error."""
        self._queue.put((error, name))
        with self._runs:
            found = self._error or error
        return type(found)(*found.args)

    @torch.no_grad()
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
            self._begun.clear()
        for request in found:
            request.begin(failed)
        self._runs.release()
        if failed.__cause__ is not None:
            traceback.clear_frames(failed.__cause__.__traceback__)
            self._connections.close(is_failed=True)

    def _account(self, error: Exception) -> str:
        """Returns what has failed, in this rank or in others. The store has each rank's account of it."""
        is_lost = isinstance(error, RuntimeError) and "gloo" in str(error)
        mine = "" if is_lost else f"rank {self.ranks[self.rank]} failed: {type(error).__name__}: {error}"
        others, accounts = {rank for rank in range(self.size) if rank != self.rank}, [mine]
        try:
            self._store.set(f"account/{self.rank}", mine)
            deadline = time.monotonic() + ROLL_CALL()
            while is_lost and others and time.monotonic() < deadline:
                found = {rank for rank in others if self._store.check([f"account/{rank}"])}
                accounts += [self._store.get(f"account/{rank}").decode() for rank in sorted(found)]
                others -= found
                time.sleep(0.0 if found else 0.05)
        except RuntimeError:
            # Rank 0 has the store.
            others = {at for at in others if self.ranks[at] == 0}
        what = "; ".join(filter(None, accounts))
        if not what:
            what = f"rank {[self.ranks[rank] for rank in sorted(others)]} has died" if others else str(error)
        unfinished = [one.name for one in (*self._begun.values(), *self._mine.values()) if not one.is_stored()]
        waits = ", ".join(map(repr, list(dict.fromkeys([*self._lost, *unfinished]))[:5]))
        return f"{what}, while rank {self.ranks[self.rank]} waited for {waits or 'others'}"

    def _receive(self) -> None:
        """Takes what callers have issued; waits for it as long as this rank's state allows."""
        quiet = time.monotonic() - self._quiet_since if self._quiet_since else 0.0
        timeout = min(quiet / 10, PAUSE + quiet / 1000, TICK) if self._mine or self._flags else TICK
        timeout = 0.0 if self._unsent else timeout
        with contextlib.suppress(queue.Empty):
            while True:
                found = self._queue.get(timeout > 0, timeout or None)
                timeout = 0.0
                if isinstance(found, tuple):
                    self._lost = [found[1]]
                    raise found[0]
                if isinstance(found, int):
                    self._flags |= found
                elif found.metas:
                    self._unsent.append(found)

    def _cycle(self) -> bool:
        """Exchanges a message, and begins what is ready. Returns False once all ranks have ended."""
        self._receive()
        while (first := next(iter(self._begun.values()), None)) and first.is_completed():
            del self._begun[first.key]
        now = time.monotonic()
        flags, touched = self._exchange(now)
        if any((new ^ old) & (JOINED | ENDED) for new, old in zip(flags, self._all_flags, strict=True)):
            touched = dict.fromkeys(self._table)
            joined = [rank for rank in range(self.size) if flags[rank] & ~self._all_flags[rank] & JOINED]
            self._last = joined[-1] if joined else self._last
        self._all_flags = flags
        self._quiet_since = 0.0 if touched else self._quiet_since or now
        if any(each & EXPIRED for each in flags):
            self._expire()
        if ready := [key for key in touched if self._is_ready(self._table[key])]:
            self._begin(ready)
        self._end_join()
        if self._quiet_since and self._mine:
            self._warn(now)
        return not all(each & ENDED for each in flags)

    def _exchange(self, now: float) -> tuple[list[int], dict[int, None]]:
        """Returns the flags of all ranks, and the operations that their messages announce, in one order."""
        oldest = min((one.since for one in list(self._mine.values()) if one.key in self._table), default=now)
        flags = self._flags | (EXPIRED if now - oldest > self._timeout else 0)
        sent, self._unsent = self._unsent[:CAPACITY], self._unsent[CAPACITY:]
        # A rank has joined or ended only once all that it has issued before is announced.
        row = [flags & ~(JOINED | ENDED) if self._unsent else flags, len(sent)]
        for request in sent:
            # All ranks must know which operations share memory in one of them, and are not reduced together.
            users = [found for found in map(self._users.get, request.memory) if found and not found.is_stored()]
            row += request.key, request.digest, request.payload if request.is_number else bool(users)
            self._users.update(dict.fromkeys(request.memory, request))
        self._row[: len(row)] = array.array("q", row)
        self._connections.gloo._allgather_base(*self._buffers).wait()
        for request in sent:
            request.since = time.monotonic()  # Operations under way may have kept the others from hearing of it.
        rows, length, touched = self._rows, len(self._row), dict[int, None]()
        for rank in range(self.size):
            start = rank * length + 2
            for at in range(start, start + 3 * rows[start - 1], 3):
                self._table.setdefault(rows[at], {})[rank] = rows[at + 1], rows[at + 2]
                touched[rows[at]] = None
        return list(rows[::length]), touched

    def _is_ready(self, issued: dict[int, tuple[int, int]]) -> bool:
        return all(rank in issued or self._all_flags[rank] & (JOINED | ENDED) for rank in range(self.size))

    def _end_join(self) -> None:
        key, flags = hashes("join.", ())[0], self._all_flags
        if not self._flags & JOINED or key not in self._mine:
            return
        joined, gone = ([rank for rank, each in zip(self.ranks, flags, strict=True) if each & 3 in kinds]
                        for kinds in ((JOINED, JOINED | ENDED), (ENDED,)))  # fmt: skip
        if len(joined) == self.size:
            # Ranks that joined early have made fewer calls without a name.
            self._calls.clear()
            self._all_flags = [each & ~JOINED for each in flags]
        elif not gone:
            return
        self._flags &= ~JOINED
        error = StallError(f"rank {joined} waits in join(), but rank {gone} has ended") if gone else None
        self._release(self._mine[key], error)

    def _release(self, request: Request, error: Exception | None = None) -> None:
        """Lets callers wait for the collectives of an operation, or fail, and its name be used again."""
        with self._lock:
            self._mine.pop(request.key, None)
            self._begun[request.key] = request
        request.begin(error)

    def _begin(self, ready: list[int]) -> None:
        issued = {key: self._table.pop(key) for key in ready}
        differ = {key for key, of in issued.items() if len({digest for digest, _ in of.values()}) > 1}
        unclear = [key for key, of in issued.items() if key in differ or len(of) < self.size]
        told, begun, alone = self._tell(unclear) if unclear else [], list[Request](), list[Request]()
        for key, of in issued.items():
            mine, error = self._mine.get(key), None
            if key in unclear:
                name, metas = told[min(of)][key]
                error = self._refusal(name, metas, [at for at in range(self.size) if at not in of])
                if key in differ:
                    parts = [f"rank {self.ranks[at]}: {', '.join(map(str, told[at][key][1]))}" for at in sorted(of)]
                    error = MismatchError(f"{name!r} is not the same on all ranks: {'; '.join(parts)}")
                if mine is None and error is None:
                    # Of this rank, which has joined.
                    mine = Request(name, metas, [self._zeros(meta) for meta in metas])
            if mine is not None and error is not None:
                self._release(mine, error)
            elif mine is not None and mine.is_number and key not in unclear:
                mine.collectives.append(of_numbers(mine, [of[at][1] for at in range(self.size)]))
                self._release(mine)
            elif mine is not None:
                (alone if any(payload for _, payload in of.values()) else begun).append(mine)
        for batch in (begun, *([one] for one in alone)):
            self._connections.begin(batch)
            for request in batch:
                self._release(request)

    def _zeros(self, meta: Meta) -> torch.Tensor:
        """Returns the zeros that a rank which has joined adds to a sum, on its GPU if the others' are on theirs."""
        return torch.zeros(meta.shape, dtype=meta.dtype, device=self._device if meta.device == "cuda" else meta.device)

    def _tell(self, keys: Sequence[int]) -> list[dict[int, tuple[str, tuple[Meta, ...]]]]:
        """Returns the names and properties that every rank has for these operations."""
        mine = {key: (self._mine[key].name, self._mine[key].metas) for key in keys if key in self._mine}
        return [pickle.loads(each) for each in self._connections.gather_bytes(pickle.dumps(mine))]

    def _refusal(self, name: str, metas: Sequence[Meta], missing: list[int]) -> Exception | None:
        """Returns the error of an operation that some ranks lack; None if they take part with zeros."""
        lacking = [self.ranks[at] for at in missing]
        if gone := [self.ranks[at] for at in missing if self._all_flags[at] & 3 == ENDED]:
            others = [rank for rank in self.ranks if rank not in lacking]
            return StallError(f"{name!r} was issued by rank {others}, but rank {gone} has ended without it")
        if not missing or all(meta.kind == "barrier" or meta.op in (SUM, AVERAGE) for meta in metas):
            return None
        if metas[0].kind == "allreduce":
            return MismatchError(f"{name!r}: rank {lacking} has joined, which only sums and averages allow: {metas[0]}")
        return MismatchError(f"{name!r}: {metas[0].kind} needs rank {lacking}, which has joined")

    def _lacking(self, key: int, name: str) -> str:
        issued = self._table.get(key, {})
        has = [rank for at, rank in enumerate(self.ranks) if at in issued]
        lacks = [rank for rank in self.ranks if rank not in has]
        return f"{name!r} was issued by rank {has}, but rank {lacks} has not"

    def _warn(self, now: float) -> None:
        late = [one for one in [*self._mine.values()] if one.key in self._table and now - one.since > self._warn_after]
        if late and now - self._warned > self._warn_after:
            self._warned = now
            names = "; ".join(self._lacking(one.key, one.name) for one in late[:5])
            waited = now - min(one.since for one in late)
            print(f"rankzero: rank {self.ranks[self.rank]} has waited {waited:.0f} s: {names}", flush=True)

    def _expire(self) -> None:
        names = {key: name for told in self._tell(list(self._table)) for key, (name, _) in told.items()}
        named = [self._lacking(key, name) for key, name in sorted(names.items(), key=lambda item: item[1])]
        raise StallError(f"for {self._timeout:g} s {'; '.join(named[:5])}")
