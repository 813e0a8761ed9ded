"""`Coordinator`: collectives matched by name, in whatever order each rank issues them.

torch.distributed matches collectives by their order, Horovod by their names: the hooks of a backward pass fire in
another order on each rank. So ranks first agree, in rounds. In a round each rank sends what it has newly issued (an
all-gather of a small buffer); what all of them have issued is then carried out by all, in the same order, small
allreduces of one kind fused. A rank that waits for nothing joins no round, and the others wait for it in theirs.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rankzero.compat.horovod.torch import execute
from rankzero.compat.horovod.torch.agreement import JOINED, SHUT_DOWN, WAITING, Agreement, Issued
from rankzero.compat.horovod.torch.errors import HorovodInternalError, StallError
from rankzero.compat.horovod.torch.messages import (
    Handle,
    Meta,
    Numbers,
    Request,
    Said,
    aligned,
    inline_begin,
)
from rankzero.compat.horovod.torch.rounds import Received, Rounds
from rankzero.compat.horovod.torch.stalls import roll_of

ROUND_PAUSE = 0.001
"""Seconds before the next round when one has agreed on nothing."""

NAMED = 5
"""Operations that an error names, of those that failed together."""


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
        self._roll = roll_of(control, self.ranks, self.rank) if self.rank >= 0 else None
        self._timeout = timeout.total_seconds()
        self.warn_after = warn_after
        self._numbers = Numbers()
        self._calls: Counter[str] = Counter()
        self._agreement = Agreement(self.ranks)
        self._requests: dict[str, Request] = {}
        self._new: list[Request] = []
        self._flag = 0
        self._joining: Handle | None = None
        self._waiters = 0
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
            self._flag |= JOINED
        return int(self.wait(handle))

    def shut_down(self) -> None:
        """Says that this rank issues nothing more, and waits until all say so.

        What another rank still expects of this one fails there, at once.
        """
        if self.rank < 0 or self.size == 1:
            return
        with self._mutex:
            self._flag |= SHUT_DOWN
        while not self._is_over:
            with self._turn:
                if not self._is_over:
                    self._round()
        self._wake()

    def stall(self) -> float:
        """Seconds for which the present round has waited for a rank."""
        since = self._round_since
        return 0.0 if since is None else time.monotonic() - since

    def call_roll(self) -> str:
        """Says that this rank is there; who is not, and what this rank waits for."""
        number, stall = self._rounds.number, self.stall()
        missing: list[int] = []
        if self._roll:
            self._roll.say(number)
            missing = self._roll.missing(number)
        whom = f"rank {missing}" if missing else "another rank"
        names = self._awaited()
        return f"{self._me} has waited {stall:.0f} s for {whom} to {f'issue {names}' if names else 'go on or to end'}"

    @property
    def _me(self) -> str:
        return f"rank {self.ranks[self.rank]}"

    def _awaited(self) -> str:
        """What this rank has issued and not got."""
        with self._mutex:
            return ", ".join(map(repr, sorted(self._requests)))

    # -- rounds --------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        return self._failed is not None or self._agreement.is_over

    def _wake(self) -> None:
        """Lets the thread see what has changed."""
        with self._wanted:
            self._wanted.notify()

    def _has_work(self) -> bool:
        return bool(self._requests or self._joining)

    def _run(self) -> None:
        while not self._is_over:
            with self._wanted:
                self._wanted.wait_for(lambda: self._has_work() or self._is_over)
            with self._turn:
                if self._has_work() and not self._is_over:
                    self._round()

    def _round(self) -> None:
        """One exchange, and what it makes possible. Needs `_turn`."""
        try:
            if self._failed:
                raise self._failed
            with self._mutex:
                new, self._new = self._new, []
                flags = self._flag | (WAITING if self._waiters else 0)
            message = self._numbers.encode(flags, new)
            received = self._exchange(message)
            if self._reduced_at_once(new, message, received):
                return
            said = [self._numbers.decode(message) for message in received.messages]
            ready = self._agreement.hear(said)
            self._carry_out(ready, said, received)
            self._end_joins()
            self._agreement.look_for_stalls(said, agreed=bool(ready))
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
            if self.stall() >= self._timeout:
                raise StallError(self.call_roll()) from error
            lost = self.ranks[self._rounds.source]
            raise StallError(
                f"{self._me} waits for {self._awaited() or 'the others'}, but rank {lost} has died or failed: {error}"
            ) from error
        finally:
            self._round_since = None

    def _reduced_at_once(self, new: Sequence[Request], message: bytes, received: Received) -> bool:
        """What most rounds are: all ranks send tiny tensors of the same names, known to all, and nothing else."""
        begin = inline_begin(message, (0, WAITING))
        if not begin or any(other[:begin] != message[:begin] for other in received.messages):
            return False
        with self._mutex:
            for request in new:
                del self._requests[request.full_name]
        for request in new:
            execute.reduce_inline(request.meta, request, received.tensors(request.meta, (begin,) * self.size))
            begin += aligned(request.meta.inline_bytes)
        return True

    def _carry_out(self, ready: dict[str, Issued], said: Sequence[Said], received: Received) -> None:
        batch: list[tuple[Meta, Request]] = []
        for name, issued in ready.items():
            meta = next(iter(issued.values()))
            request = self._taken(name, meta)
            if error := self._agreement.refusal(name, meta, issued):
                request.handle.finish(error=error)
            elif meta.kind != "allreduce":
                # The others' order is the order in which all ranks do it.
                self._reduce(batch)
                batch = []
                with _naming([name]):
                    execute.run(self, meta, request)
            elif meta.inline_bytes and all(name in message.inline for message in said):
                begins = tuple(message.inline[name] for message in said)
                execute.reduce_inline(meta, request, received.tensors(meta, begins))
            else:
                batch.append((meta, request))
        self._reduce(batch)

    def _reduce(self, batch: Sequence[tuple[Meta, Request]]) -> None:
        with _naming([request.full_name for _, request in batch]):
            execute.allreduce(self, batch)

    def _taken(self, name: str, meta: Meta) -> Request:
        """This rank's part; zeros of a rank that has joined."""
        with self._mutex:
            request = self._requests.pop(name, None)
        return request or Request(name, 0, meta, execute.neutral(meta))

    def _end_joins(self) -> None:
        last = self._agreement.end_joins()
        if last is None:
            return
        with self._mutex:
            joining, self._joining = self._joining, None
            self._flag &= ~JOINED
            # Ranks that joined early have called less.
            self._calls.clear()
        if joining:
            joining.finish(last)

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
        self._wake()


@contextlib.contextmanager
def _naming(names: Sequence[str]) -> Iterator[None]:
    """Lets what torch says of an operation begin with its name."""
    try:
        yield
    except RuntimeError as error:
        more = f" and {len(names) - NAMED} others" if len(names) > NAMED else ""
        raise HorovodInternalError(f"{', '.join(map(repr, names[:NAMED]))}{more}: {error}") from error
