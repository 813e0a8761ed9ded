"""`Coordinator`: executes collectives that are matched by name, in whatever order each rank issues them.

torch.distributed matches collectives by their order, Horovod by their names, since the hooks of a backward pass fire in
a different order on each rank. The ranks therefore first agree, in rounds. In a round each rank sends the operations
that it has newly issued (an all-gather of a small buffer). All ranks then execute the operations that every rank has
issued, in the same order; small allreduces of one kind are fused. A rank that waits for no result takes part in no
round, and the other ranks wait for it in theirs.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rankzero import bounds
from rankzero.compat.horovod.torch import execute
from rankzero.compat.horovod.torch.agreement import (
    JOINED,
    SHUT_DOWN,
    WAITING,
    Agreement,
    Issued,
    Received,
    Requests,
    Rounds,
    Turn,
    listed,
)
from rankzero.compat.horovod.torch.errors import HorovodInternalError, StallError
from rankzero.compat.horovod.torch.messages import (
    Handle,
    Meta,
    Numbers,
    Report,
    Request,
    aligned,
    failure_message,
    inline_begin,
)


class Coordinator:
    """A rank's member of a set of ranks. A thread that waits for a result runs the rounds, or else its own thread."""

    def __init__(self, ranks: Sequence[int], timeout: timedelta, warn_after: float) -> None:
        """Creates the set's process groups. Every rank of the world must do so, members or not.

        Args:
            ranks: Global ranks of the set.
            timeout: Time after which an operation that a rank has not issued is an error.
            warn_after: Seconds after which such an operation is logged as a warning.
        """
        control = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
        # A group for tensors on the CPU, and with GPUs another one for theirs.
        self._data = {"cpu": dist.new_group(list(ranks), timeout=timeout, backend="gloo")}
        if dist.get_backend() != "gloo":
            self._data["gpu"] = dist.new_group(list(ranks), timeout=timeout)
        self._groups = [control, *self._data.values()]
        self.ranks = list(ranks)
        me = dist.get_rank()
        self.rank = self.ranks.index(me) if me in self.ranks else -1
        """This rank's index in the set; -1 if it is not a member."""
        self._rounds = Rounds(control, self.rank, len(ranks))
        self._roll = Roll(control, self.ranks, self.rank) if self.rank >= 0 else None
        self._timeout = timeout.total_seconds()
        self.warn_after = warn_after
        self.optimizers = itertools.count(1)
        """Numbers of the optimizers that reduce gradients over this set."""
        self._numbers = Numbers()
        self._agreement = Agreement(self.ranks, self._timeout, warn_after)
        self._flag = 0
        self._reporting: threading.Thread | None = None
        self._joining: Handle | None = None
        self._ending: Handle | None = None
        self._waiters = 0
        self._mutex = threading.Lock()
        self.requests = Requests(self._mutex)
        """The operations that this rank has issued; `wait` or `drive` executes them."""
        self._turn = Turn(self._mutex)
        self._thread: threading.Thread | None = None
        self._round_since: float | None = None

    @property
    def size(self) -> int:
        """Returns the number of ranks of the set."""
        return len(self.ranks)

    def process_group(self, device: torch.device) -> Any:
        """Returns torch's process group for tensors on a device."""
        return self._data["cpu"] if device.type == "cpu" else self._data.get("gpu", self._data["cpu"])

    # -- what callers do -----------------------------------------------------------------------

    def drive(self) -> None:
        """Lets the coordinator's thread execute the issued operations while the caller continues."""
        with self._mutex:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rankzero-horovod", daemon=True)
                self._thread.start()
            self._turn.wake()

    def wait(self, handle: Handle) -> Any:
        """Returns the result of an operation. Raises the error with which it failed."""

        def is_needed() -> bool:
            # A finished operation ends the wait, too: the thread with the turn may block on ranks that need this one.
            return not handle.is_done

        with self._mutex:
            self._waiters += 1
            try:
                while self._turn.take(is_needed):
                    self._carry_on()
                    if self.requests.failed and not handle.is_done:
                        # The operation failed while it was executed.
                        handle.finish(error=self.requests.failed)
            finally:
                self._waiters -= 1
                self._turn.wake()
        if handle.error:
            raise handle.error
        return handle.result

    def join(self) -> int:
        """Takes part in other ranks' allreduces with zeros until all have joined; returns the rank that joined last."""
        handle = Handle()
        with self._mutex:
            if self.requests.failed:
                raise self.requests.failed
            self._joining = handle
            self._flag |= JOINED
        return int(self.wait(handle))

    def end(self) -> None:
        """Announces that this rank issues no more operations; `await_end` waits until all ranks have done so.

        Operations for which other ranks still wait for this one fail there immediately.
        """
        with self._mutex:
            self._flag |= SHUT_DOWN
            self._ending = Handle()
            if self.requests.failed or self.rank < 0 or self.size == 1:
                self._ending.finish()
            self._turn.wake()

    def await_end(self) -> None:
        """Waits until no rank issues more operations, or one has failed."""
        if self._ending:
            with contextlib.suppress(HorovodInternalError):
                self.wait(self._ending)

    def destroy(self) -> None:
        """Closes the connections of a set that has ended or failed."""
        for group in self._groups if self.rank >= 0 else ():
            # The user may have destroyed torch's default group, and with it these.
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(group)

    def await_peers(self) -> None:
        """Waits until all ranks know that an operation has failed in this one.

        Raises:
            HorovodInternalError: a rank does not come to its next round within ``warn_after``.
        """
        if self._reporting:
            self._reporting.join(self.warn_after)
            if self._reporting.is_alive():
                raise HorovodInternalError(
                    f"{self._me} cannot initialize again: others may still wait for it in the operation that has "
                    "failed in this rank alone, which nothing interrupts. Let the error end the attempt, with "
                    "max_restarts and restart_on for another one"
                ) from self.requests.failed

    # -- who is waited for ---------------------------------------------------------------------

    def stall(self) -> float:
        """Returns the seconds for which the current round has waited for a rank."""
        since = self._round_since
        return 0.0 if since is None else time.monotonic() - since

    def call_roll(self) -> str:
        """Records that this rank is in its round; returns which ranks are missing, and what this rank waits for."""
        number, stall = self._rounds.number, self.stall()
        missing = self._roll.answer(number) if self._roll else []
        whom = f"rank {missing}" if missing else "another rank"
        names = self._awaited()
        return f"{self._me} has waited {stall:.0f} s for {whom} to {f'issue {names}' if names else 'continue or end'}"

    @property
    def _me(self) -> str:
        return f"rank {self.ranks[self.rank]}"

    def _awaited(self) -> str:
        """Returns the names of the operations that this rank has issued and that have not finished."""
        return listed(self.requests.names())

    # -- rounds --------------------------------------------------------------------------------

    def _run(self) -> None:
        def is_needed() -> bool:
            has_ended = self._ending and self._ending.is_done and not self.requests
            return not (self.requests.failed or self._agreement.is_over or has_ended)

        def has_work() -> bool:
            is_ending = self._ending and not self._ending.is_done
            return bool(self.requests or self._joining or is_ending) and not self._waiters

        with self._mutex:
            while self._turn.take(is_needed, has_work):
                self._carry_on()

    def _carry_on(self) -> None:
        """Runs one round without the mutex, and ends the turn."""
        try:
            self._mutex.release()
            self._round()
        finally:
            self._mutex.acquire()
            self._turn.give()

    def _round(self) -> None:
        """Exchanges messages, and executes the operations that are ready. Needs the turn."""
        if self.requests.failed:
            return
        try:
            # The flags are read first: a rank that has joined has issued all operations before.
            flags = self._flag | (WAITING if self._waiters else 0)
            new = self.requests.new()
            message = self._numbers.encode(flags, new)
            try:
                received = self._exchange(message)
            except StallError as error:
                self._fail(error, is_known=True)
                return
            if self._reduced_inline(new, message, received):
                return
            reports = [self._numbers.decode(message) for message in received.messages]
            if failures := [report.failure for report in reports if report.failure]:
                self._fail(HorovodInternalError(failures[0]), is_known=True)
                return
            ready = self._agreement.receive(reports)
            # A caller that waits in inference mode may execute operations whose tensors others train with.
            with torch.inference_mode(False):
                self._carry_out(ready, reports, received)
            self._end_waits()
            if late := self._agreement.check_stalls(reports, agreed=bool(ready)):
                print(f"rankzero: {late}", flush=True)
        except Exception as error:
            self._fail(error)
            return
        except BaseException as error:
            # A signal handler has raised: this rank no longer knows which operations the others execute.
            self._fail(HorovodInternalError(f"{self._me} was interrupted by {type(error).__name__}"))
            raise
        if not ready:
            time.sleep(bounds.HVD_ROUND_PAUSE)

    def _exchange(self, message: bytes) -> Received:
        self._round_since = time.monotonic()
        try:
            return self._rounds.exchange(message)
        except RuntimeError as error:
            if self.stall() >= self._timeout:
                raise StallError(self.call_roll()) from error
            lost = self.ranks[self._rounds.source]
            raise StallError(
                f"{self._me} waits for {self._awaited() or 'the others'}, but rank {lost}, or one that it waited for, "
                f"has died: {error}"
            ) from error
        finally:
            self._round_since = None

    def _reduced_inline(self, new: Sequence[Request], message: bytes, received: Received) -> bool:
        """Handles the most frequent round, in which all ranks send only tiny tensors of the same known names."""
        begin = inline_begin(message, (0, WAITING))
        if not begin or any(other[:begin] != message[:begin] for other in received.messages):
            return False
        self.requests.remove(new)
        for request in new:
            execute.reduce_inline(request.meta, request, received.tensors(request.meta, (begin,) * self.size))
            begin += aligned(request.meta.inline_bytes)
        return True

    def _carry_out(self, ready: dict[str, Issued], reports: Sequence[Report], received: Received) -> None:
        batch: list[tuple[Meta, Request]] = []
        for name, issued in ready.items():
            meta = next(iter(issued.values()))
            request = self.requests.take(name, meta)
            if error := self._agreement.refusal(name, meta, issued):
                request.handle.finish(error=error)
            elif meta.kind != "allreduce":
                # Other operations are executed in the agreed order, after the reductions before them.
                self._reduce(batch)
                batch = []
                with _naming([name]):
                    execute.run(self, meta, request)
            elif meta.inline_bytes and all(name in message.inline for message in reports):
                begins = tuple(message.inline[name] for message in reports)
                execute.reduce_inline(meta, request, received.tensors(meta, begins))
            else:
                batch.append((meta, request))
        self._reduce(batch)

    def _reduce(self, batch: Sequence[tuple[Meta, Request]]) -> None:
        with _naming([request.full_name for _, request in batch]):
            execute.allreduce(self, batch)

    def _end_waits(self) -> None:
        """Finishes `join` once all ranks have joined, and `await_end` once all have ended."""
        last = self._agreement.end_joins()
        if last is not None:
            # Ranks that joined early have made fewer calls, so the numbers of calls differ.
            self.requests.forget_calls()
            with self._mutex:
                joining, self._joining = self._joining, None
                self._flag &= ~JOINED
            if joining:
                joining.finish(last)
        if self._ending and self._agreement.is_over:
            self._ending.finish()

    def _fail(self, error: Exception, *, is_known: bool = False) -> None:
        """Fails all operations of this rank, and sends the failure to the other ranks unless it is known to them."""
        failed = error if isinstance(error, HorovodInternalError) else HorovodInternalError(str(error))
        if failed is not error:
            failed.__cause__ = error
        self.requests.fail(failed)
        with self._mutex:
            waiting = [handle for handle in (self._joining, self._ending) if handle]
            self._joining = None
        for handle in waiting:
            handle.finish(error=failed)
        if not is_known:
            # The other ranks receive the failure in their next round, for which this rank does not wait.
            message = failure_message(f"{self._me} failed: {failed}")

            def report() -> None:
                with contextlib.suppress(RuntimeError):
                    self._rounds.exchange(message)

            self._reporting = threading.Thread(target=report, name="rankzero-horovod-failure", daemon=True)
            self._reporting.start()


class Roll:
    """Finds the ranks of a set that have not come to a slow round, by their entries in torch's store.

    Args:
        group: Process group of the set, whose name is the prefix of its entries.
        ranks: Global ranks of the set.
        rank: Index of this rank in the set.
    """

    def __init__(self, group: Any, ranks: Sequence[int], rank: int) -> None:
        store = distributed_c10d._get_default_store()
        self._store = distributed_c10d.PrefixStore(f"rankzero.horovod.{group.group_name}", store)
        self._ranks = ranks
        self._rank = rank
        self._answered = 0

    def answer(self, number: int) -> list[int]:
        """Records that this rank has come to a round.

        Returns:
            Global ranks that have not recorded it; an empty list if the store is closed.
        """
        try:
            if number > self._answered:
                self._answered = number
                self._store.set(str(self._rank), str(number))
            others = [index for index in range(len(self._ranks)) if index != self._rank]
            return [self._ranks[index] for index in others if not self._came(index, number)]
        except RuntimeError:
            return []

    def _came(self, index: int, number: int) -> bool:
        key = str(index)
        return bool(self._store.check([key])) and int(self._store.get(key)) >= number


@contextlib.contextmanager
def _naming(names: Sequence[str]) -> Iterator[None]:
    """Adds the names of the operations to torch's error messages in the block."""
    try:
        yield
    except RuntimeError as error:
        raise HorovodInternalError(f"{listed(names)}: {error}") from error
