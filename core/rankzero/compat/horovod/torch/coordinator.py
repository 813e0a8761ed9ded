"""`Coordinator`: matches operations by name, in whatever order each rank issues them, and executes them in one order.

torch.distributed matches collectives by their order, Horovod by their names, since the hooks of a backward pass fire in
a different order on each rank. Each process set therefore has a thread, which alone uses the set's connections. In each
cycle the threads all-gather a small message: for every operation that a rank has issued since the last cycle a hash of
its name and one of everything that must be equal. So every rank keeps the same table and finds the same operations
ready. Names and shapes travel only for errors and for ranks that have joined. A rank without operations sleeps, and the
others wait in their all-gather, since nothing can become ready without it.

Horovod itself exchanges a bit vector of known names instead. The two ways were not measured against each other.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import pickle
import queue
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rankzero.compat.horovod.torch import execute
from rankzero.compat.horovod.torch.requests import (
    HorovodInternalError,
    Meta,
    MismatchError,
    Request,
    StallError,
    hashes,
)

JOINED, ENDED, WAITING, DEADLOCK, EXPIRED = 1, 2, 4, 8, 16
"""What a message announces of its rank, beside operations."""

CAPACITY = 32
"""Operations that one message announces; further ones follow in the next cycle."""

TICK = 1.0
"""Seconds after which an idle rank takes part in a cycle, so that others receive its state."""

PAUSE = 0.005
"""Longest pause in seconds between cycles in which nothing was issued; it grows by a thousandth of the time waited."""

DEADLOCK_AFTER = 5.0
"""Seconds without a new operation after which ranks that all wait in `Request.wait` fail."""

ROLL_CALL = 5.0
"""Seconds that a rank waits for the others' accounts of a lost connection; longer than `TICK`."""


class Coordinator:
    """The connections of a process set, and the thread that uses them.

    The thread is a daemon, but `close` joins it before Python finalizes. The buffers of the messages live as long as
    the coordinator, and the tensors of a batch until the batch after it: if gloo's thread freed a tensor of Python
    while Python finalizes, the process would abort ("terminate called without an active exception").

    Args:
        number: Number of the set, counted over the life of the process: the same on all ranks.
        ranks: Global ranks of the set.
        timeout: Seconds after which an operation that another rank has not issued is an error.
        warn_after: Seconds after which a line names such an operation, and after which it is repeated.
    """

    def __init__(self, number: int, ranks: Sequence[int], timeout: float, warn_after: float) -> None:
        self.ranks, self.size = list(ranks), len(ranks)
        self.rank = self.ranks.index(dist.get_rank()) if dist.get_rank() in self.ranks else -1
        """Index of this rank in the set; -1 if it is not a member."""
        self.optimizers = itertools.count(1)
        """Numbers of the optimizers that reduce gradients over this set."""
        self.error: Exception | None = None
        self._timeout, self._warn_after, self._warned = timeout, warn_after, 0.0
        limit = timedelta(seconds=timeout + 10 * TICK)
        self.accelerated: Any = None
        if dist.get_backend() != "gloo":
            # Ranks that are no members must call it, too.
            self.accelerated = dist.new_group(self.ranks, timeout=limit)
        self.control: Any = None
        if self.rank < 0:
            return
        self._store = dist.PrefixStore(f"rankzero/hvd/{number}", distributed_c10d._get_default_store())
        # Not registered with torch.distributed, whose references would keep the connections of a failed rank open.
        self.control = dist.ProcessGroupGloo(self._store, self.rank, self.size, timeout=limit)
        self.streams: dict[torch.device, Any] = {}
        self.batch: list[execute.Running] = []
        """The collectives that were begun last, with their tensors."""
        self._queue: queue.SimpleQueue[Request | int] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._calls: dict[str, int] = {}
        self._mine: dict[int, Request] = {}
        self._unsent: list[Request] = []
        self._table: dict[int, dict[int, tuple[int, int]]] = {}
        self._flags, self._all_flags, self._waiters = 0, [0] * self.size, 0
        self._quiet_since, self._last = 0.0, 0
        length = 2 + 3 * CAPACITY
        self._row, self._rows = array.array("q", bytes(8 * length)), array.array("q", bytes(8 * length * self.size))
        self._message = torch.frombuffer(self._row, dtype=torch.int64)
        self._messages = torch.frombuffer(self._rows, dtype=torch.int64)
        self._thread = threading.Thread(target=self._run, name="rankzero-horovod", daemon=True)
        self._thread.start()

    # -- what callers do -----------------------------------------------------------------------

    def name(self, kind: str, name: str | None) -> str:
        """Returns the name by which ranks match an operation: the user's, or the number of the call without one."""
        if name is None and self.rank >= 0:
            with self._lock:
                self._calls[kind] = self._calls.get(kind, 0) + 1
                name = f"noname.{self._calls[kind]}"
        return f"{kind}.{name}"

    def issue(self, request: Request) -> Request:
        """Gives an operation to the thread.

        Raises:
            ValueError: this rank is not a member, or an operation of this name has not ended.
            HorovodInternalError: an earlier operation has failed.
        """
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is no member of the process set of ranks {self.ranks}")
        with self._lock:
            if self.error is not None:
                raise type(self.error)(*self.error.args) from self.error
            if request.key in self._mine:
                raise ValueError(
                    f"{request.name!r} was issued again before it has ended: wait for it, or use another name"
                )
            request.issued_to(self)
            self._mine[request.key] = request
            self._queue.put(request)
        return request

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts a thread that waits for an operation."""
        with self._lock:
            self._waiters += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiters -= 1

    def join(self) -> int:
        """Adds zeros to sums of other ranks until all have joined; returns the rank that joined last."""
        joined = self.issue(Request("join", [], []))
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
            self._thread.join()
            self._disconnect()

    def group(self, device: torch.device) -> Any:
        """Returns torch's process group for tensors on a device."""
        return self.control if device.type == "cpu" or self.accelerated is None else self.accelerated

    # -- the thread ----------------------------------------------------------------------------

    @torch.no_grad()
    def _run(self) -> None:
        try:
            while self._cycle():
                pass
            self._fail(HorovodInternalError("Horovod has been shut down"))
        except HorovodInternalError as error:
            # All ranks raise it in the same cycle.
            self._fail(error)
        except Exception as error:
            failed = HorovodInternalError(self._account(error))
            failed.__cause__ = error
            self._fail(failed)
            traceback.clear_frames(error.__traceback__)
            self._disconnect()

    def _disconnect(self) -> None:
        """Closes the connections, so that no rank waits for this one."""
        for running in self.batch:
            with contextlib.suppress(RuntimeError):
                running.work.wait()
        # gloo closes them, and joins its threads, when nothing refers to the group any more.
        self.control = None
        self.batch = []
        if self.accelerated is not None and dist.is_initialized():
            if self.error is not None and hasattr(self.accelerated, "abort"):
                self.accelerated.abort()
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(self.accelerated)
        self.accelerated = None

    def _account(self, error: Exception) -> str:
        """Returns what has failed, in this rank or in others. The store has each rank's account of it."""
        is_lost = isinstance(error, RuntimeError) and "gloo" in str(error)
        mine = "" if is_lost else f"rank {self.ranks[self.rank]} failed: {type(error).__name__}: {error}"
        missing = {rank for rank in range(self.size) if rank != self.rank}
        accounts = [mine] if mine else []
        try:
            self._store.set(f"account/{self.rank}", mine)
            deadline = time.monotonic() + ROLL_CALL
            while is_lost and missing and time.monotonic() < deadline:
                if found := {rank for rank in missing if self._store.check([f"account/{rank}"])}:
                    missing -= found
                    accounts += [self._store.get(f"account/{rank}").decode() for rank in sorted(found)]
                else:
                    time.sleep(0.05)
        except RuntimeError:
            # Rank 0 has the store.
            missing &= {0}
        accounts = [account for account in accounts if account]
        if missing and not accounts:
            accounts = [f"rank {[self.ranks[rank] for rank in sorted(missing)]} has died"]
        waits = "; ".join(repr(request.name) for request in list(self._mine.values())[:5])
        return f"{'; '.join(accounts) or error}, while rank {self.ranks[self.rank]} waited for {waits or 'others'}"

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self.error, found = error, list(self._mine.values())
            self._mine.clear()
        for request in found:
            request.end(error)

    def _receive(self) -> None:
        """Takes what callers have issued; waits for it as long as this rank's state allows."""
        quiet = time.monotonic() - self._quiet_since if self._quiet_since else 0.0
        timeout = min(quiet / 10, PAUSE + quiet / 1000) if self._mine or self._flags else TICK
        timeout = 0.0 if self._unsent else timeout
        with contextlib.suppress(queue.Empty):
            while True:
                found = self._queue.get(timeout > 0, timeout or None)
                timeout = 0.0
                if isinstance(found, int):
                    self._flags |= found
                elif found.name != "join":
                    self._unsent.append(found)

    def _cycle(self) -> bool:
        """Exchanges a message, and executes what is ready. Returns False once all ranks have ended."""
        self._receive()
        now = time.monotonic()
        flags = self._exchange(self._own_flags(now))
        touched = self._merge()
        if flags != self._all_flags:
            new = [rank for rank in range(self.size) if flags[rank] & JOINED > self._all_flags[rank] & JOINED]
            self._last = new[-1] if new else self._last
            if any((flags[rank] ^ self._all_flags[rank]) & (JOINED | ENDED) for rank in range(self.size)):
                touched = dict.fromkeys(self._table)
            self._all_flags = flags
        self._quiet_since = 0.0 if touched else self._quiet_since or now
        if any(each & EXPIRED for each in flags) or (not touched and any(each & DEADLOCK for each in flags)):
            self._expire(flags)
        if ready := [key for key in touched if self._is_ready(self._table[key], flags)]:
            self._execute(ready, flags)
        self._end_join(flags)
        if self._quiet_since and self._mine:
            self._warn(now)
        return not all(each & ENDED for each in flags)

    def _own_flags(self, now: float) -> int:
        waiting = WAITING if self._waiters else 0
        if self._quiet_since and now - self._quiet_since > DEADLOCK_AFTER:
            waiting |= DEADLOCK if all(each & WAITING for each in self._all_flags) else 0
        oldest = min((one.since for one in list(self._mine.values()) if one.name != "join"), default=now)
        return self._flags | waiting | (EXPIRED if now - oldest > self._timeout else 0)

    def _exchange(self, flags: int) -> list[int]:
        sent, self._unsent = self._unsent[:CAPACITY], self._unsent[CAPACITY:]
        # A rank has joined or ended only once all that it has issued before is announced.
        row = [flags & ~(JOINED | ENDED) if self._unsent else flags, len(sent)]
        for request in sent:
            row += request.key, request.digest, request.payload
        self._row[: len(row)] = array.array("q", row)
        self.control._allgather_base(self._messages, self._message).wait()
        self.batch = []
        return list(self._rows[:: len(self._row)])

    def _merge(self) -> dict[int, None]:
        """Adds all messages to the table; returns the keys of the operations that they announce, in one order."""
        touched: dict[int, None] = {}
        for rank in range(self.size):
            start = rank * len(self._row) + 2
            for at in range(start, start + 3 * self._rows[start - 1], 3):
                key = self._rows[at]
                self._table.setdefault(key, {})[rank] = self._rows[at + 1], self._rows[at + 2]
                touched[key] = None
        return touched

    def _is_ready(self, issued: dict[int, tuple[int, int]], flags: list[int]) -> bool:
        return all(rank in issued or flags[rank] & (JOINED | ENDED) for rank in range(self.size))

    def _end_join(self, flags: list[int]) -> None:
        joining = self._mine.get(hashes("join", ())[0]) if self._flags & JOINED else None
        if all(each & JOINED for each in flags):
            # Ranks that joined early have made fewer calls without a name.
            self._calls.clear()
            self._all_flags = [each & ~JOINED for each in flags]
            self._flags &= ~JOINED
            if joining is not None:
                self.complete(joining)
        elif joining is not None and (gone := [rank for rank, each in self._members(flags) if each & 3 == ENDED]):
            self._flags &= ~JOINED
            joined = [rank for rank, each in self._members(flags) if each & JOINED]
            self.complete(joining, StallError(f"rank {joined} waits in join(), but rank {gone} has ended"))

    def _members(self, flags: list[int]) -> Iterator[tuple[int, int]]:
        return zip(self.ranks, flags, strict=True)

    def complete(self, request: Request, error: Exception | None = None) -> None:
        """Ends an operation of this rank."""
        with self._lock:
            self._mine.pop(request.key, None)
        request.end(error)

    def _execute(self, ready: list[int], flags: list[int]) -> None:
        requests, unclear = [], {}
        for key in ready:
            issued = self._table.pop(key)
            if len(issued) < self.size or len({digest for digest, _ in issued.values()}) > 1:
                unclear[key] = issued
            elif self._mine[key].is_number:
                request = self._mine[key]
                execute.reduce_numbers(request.metas[0], request.tensors[0], [issued[at][1] for at in range(self.size)])
                self.complete(request)
            else:
                requests.append(self._mine[key])
        if unclear:
            requests += self._resolve(unclear, flags)
        if requests:
            execute.run(self, requests)

    def _tell(self, keys: Sequence[int]) -> list[dict[int, tuple[str, tuple[Meta, ...]]]]:
        """Returns the names and properties that every rank has for these operations."""
        mine = {key: (self._mine[key].name, self._mine[key].metas) for key in keys if key in self._mine}
        data = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
        sizes = torch.empty(self.size, dtype=torch.int64, device="cpu")
        self.control._allgather_base(sizes, torch.tensor([len(data)], device="cpu")).wait()
        padded = torch.cat([data, data.new_zeros(int(sizes.max()) - len(data))])
        found = padded.new_empty(self.size * len(padded))
        self.control._allgather_base(found, padded).wait()
        return [pickle.loads(part.numpy().tobytes()) for part in found.split(len(padded))]

    def _resolve(self, unclear: dict[int, dict[int, tuple[int, int]]], flags: list[int]) -> list[Request]:
        """Fails operations on which ranks differ or that an ended rank lacks; adds zeros for ranks that have joined."""
        told, requests = self._tell(list(unclear)), []
        for key, issued in unclear.items():
            name, metas = told[min(issued)][key]
            missing = [at for at in range(self.size) if at not in issued]
            error = self._refusal(name, metas, missing, flags)
            if len({digest for digest, _ in issued.values()}) > 1:
                parts = [f"rank {self.ranks[at]}: {', '.join(map(str, told[at][key][1]))}" for at in sorted(issued)]
                error = MismatchError(f"{name!r} is not the same on all ranks: {'; '.join(parts)}")
            request = self._mine.get(key)
            if error is None:
                requests.append(request or Request(name, metas, [execute.neutral(meta) for meta in metas]))
            elif request is not None:
                self.complete(request, error)
        return requests

    def _refusal(self, name: str, metas: Sequence[Meta], missing: list[int], flags: list[int]) -> Exception | None:
        lacking = [self.ranks[at] for at in missing]
        gone = [self.ranks[at] for at in missing if flags[at] & 3 == ENDED]
        if gone:
            others = [rank for rank in self.ranks if rank not in lacking]
            return StallError(f"{name!r} was issued by rank {others}, but rank {gone} has ended without it")
        if not missing or all(execute.may_join(meta) for meta in metas):
            return None
        if metas[0].kind == "allreduce":
            return MismatchError(f"{name!r}: rank {lacking} has joined, which only sums and averages allow: {metas[0]}")
        return MismatchError(f"{name!r}: {metas[0].kind} needs data of rank {lacking}, which has joined")

    def _lacking(self, name: str, key: int) -> str:
        issued = self._table.get(key, {})
        has, lacks = ([rank for at, rank in enumerate(self.ranks) if (at in issued) is there] for there in (True, False))
        return f"{name!r} was issued by rank {has}, but rank {lacks} has not"

    def _warn(self, now: float) -> None:
        late = [one for key, one in list(self._mine.items()) if key in self._table and now - one.since > self._warn_after]
        if late and now - self._warned > self._warn_after:
            self._warned = now
            names = "; ".join(self._lacking(one.name, one.key) for one in late[:5])
            waited = now - min(one.since for one in late)
            print(f"rankzero: rank {self.ranks[self.rank]} has waited {waited:.0f} s: {names}", flush=True)

    def _expire(self, flags: list[int]) -> None:
        names = {key: name for told in self._tell(list(self._table)) for key, (name, _) in told.items()}
        is_late = any(each & EXPIRED for each in flags)
        why = f"for {self._timeout:g} s" if is_late else "and all ranks wait"
        named = "; ".join(self._lacking(name, key) for key, name in sorted(names.items(), key=lambda item: item[1])[:5])
        raise StallError(f"{why} {named}")
