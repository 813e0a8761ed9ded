"""`Watch` knows what ends a run from outside, whatever its attempts are doing; `HangWatch`, that its ranks hang."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from rankzero import bounds
from rankzero.channel.messages import Stack
from rankzero.driver.ending import NO_REPLY, Facts, name_ranks
from rankzero.driver.recorder import Recorder
from rankzero.errors import RunCancelledError, RunTimeoutError
from rankzero.run.directory import Submission, bound_of
from rankzero.threads import AT_ONCE, reply_of

logger = logging.getLogger(__name__)

READ_INTERVAL = 0.25  # Seconds between two reads of a run directory on a disk, where a request to cancel may appear
REASON_TIMEOUT = bounds.stretched(1.8)  # To read the reason of a cancel, which its process writes after the signal
LEASE_POLL_INTERVAL_MAX = 30.0  # Most seconds between two reads of a lease on an object store
LEASE_SHARE = 0.1  # Share of the lease's time between two of them, where each is a request
CHECK_INTERVAL = 0.5  # Most seconds between two checks of whether the run must end
MISSED_RENEWALS = 3  # Renewals that the last follower may miss: half a minute, three minutes on an object store

RETURNED_NOTICE = bounds.scaled(30.0)  # Without progress, after some ranks have returned, until a line names the others
RETURNED_HANG = bounds.scaled(300.0)  # After which ranks that then wait in a collective hang, whatever hang_timeout is
IDLE_SHARE = 0.1  # Largest share of a core that a waiting rank uses, for its heartbeat and its threads

_FRAME = re.compile(r'File "(?P<path>.*)", line (?P<line>\d+) in (?P<function>.*)')
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/torch/", "/rankzero/", "/lib/python3")
_WAITING = ("/torch/distributed/", "/torch/nn/parallel/distributed", "/rankzero/compat/horovod/torch/")
_NOT_WAITING = "/torch/distributed/checkpoint/"

T = TypeVar("T")


class Watch:
    """Knows why a run must end: a request, an interrupt, an abandoned lease or an end by another process.

    A thread reads the run directory, and hangs if the store does. The coroutine of the run checks what it has found.

    Attributes:
        interrupted: Why the run must end without a request.
        is_cancelled: True once the run must end on request.
        retrier_gone: Set once the process that would start the next try has exited, so only a present follower keeps
            the run alive.
        started_at: Monotonic time at which a rank had first begun, and all had started, from which ``timeout`` counts.
    """

    def __init__(self, own: Submission, recorder: Recorder, *, leased: bool) -> None:
        """Prepares the watch; `start` reads. The lease counts unless the driver watches its owner by other means."""
        self._own = own
        self._recorder = recorder
        self.interrupted: str | None = None
        self.is_cancelled = False
        self.retrier_gone = threading.Event()
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.started_at: float | None = None
        self._orphan_timeout = own.job.orphan_timeout if leased else None
        self._lease: bytes | None = None
        self._lease_seen = time.monotonic()
        self._next_lease = 0.0
        self._request: dict[str, Any] | None = None
        self._abandoned = ""
        self._error: RunCancelledError | None = None
        self._cancelled_at: float | None = None
        self._first_read: Future[None] = Future()
        self._hurry, self._ended = threading.Event(), False

    def interrupt(self, reason: str) -> None:
        """Asks the driver to cancel the run. Threads and signal handlers may call it."""
        self.interrupted = self.interrupted or reason
        self.wake()

    def cancel(self) -> None:
        """Cancels the run on request, also if the store does not answer. Threads and signal handlers may call it."""
        self.is_cancelled = True
        self.wake()

    def wake(self, _: object = None) -> None:
        """Wakes the coroutine of the run. Threads, signal handlers and futures may call it."""
        # The loop may be closed.
        with contextlib.suppress(RuntimeError):
            if self._loop:
                self._loop.call_soon_threadsafe(self._changed.set)

    async def wait(self, seconds: float) -> None:
        """Waits until something has changed, at most ``seconds``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._changed.wait()
        self._changed.clear()

    async def reply_of(self, future: Future[T], check: Callable[[], None]) -> T:
        """Returns the result of a thread, which may never come, unless ``check`` raises before; it is called often."""
        check()
        with contextlib.suppress(TimeoutError):
            return future.result(AT_ONCE)
        future.add_done_callback(self.wake)
        while True:
            check()
            if future.done():
                return future.result()
            await self.wait(CHECK_INTERVAL)

    def check(self) -> None:
        """Raises RunCancelledError, with the reason, or RunTimeoutError if the run must end."""
        if self.is_called_off() and self._error:
            raise self._error.with_traceback(None)
        timeout = self._own.job.timeout
        if timeout and self.started_at is not None and time.monotonic() - self.started_at > timeout:
            raise RunTimeoutError(f"the run took longer than timeout={timeout} s and was ended")

    def is_called_off(self) -> bool:
        """Returns True if the run must end on request or because another driver has it."""
        if self._error:
            return True
        now = time.monotonic()
        if self.is_cancelled and self._cancelled_at is None:
            # The process that cancels the run writes its reason into the store after it has sent the signal.
            self._cancelled_at = now
            self._hurry.set()
        is_late = self._cancelled_at is not None and now - self._cancelled_at > REASON_TIMEOUT()
        if self._recorder.superseded:
            why = "another process has ended this submission, since this driver seemed dead, or the run was removed"
            self._error = RunCancelledError(why)
        elif self._request or is_late:
            reason = (self._request or {"reason": ""})["reason"]
            text = ": ".join(filter(None, ["the run was cancelled on request", reason]))
            self._error = RunCancelledError(text, requested=True)
        elif (why := self.interrupted or self._abandoned) and not self.is_cancelled:
            self._error = RunCancelledError(why, requested=False)
        if self._error:
            self._recorder.note_cancelling()
        return self._error is not None

    async def start(self) -> None:
        """Begins to read; returns after the first time, or soon: a run that is cancelled already must not begin."""
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._follow, name="rankzero-watch", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            await reply_of(self._first_read, REASON_TIMEOUT())

    def end(self) -> None:
        """Makes the thread that reads end soon."""
        self._ended = True
        self._hurry.set()

    def _follow(self) -> None:
        has_failed = False
        while not self._ended:
            try:
                self._request = self._own.cancel_request()
                if self._orphan_timeout:
                    self._check_lease(time.monotonic(), self._orphan_timeout)
                has_failed = False
            except Exception as error:
                # An unreadable store is neither a request to cancel nor an absent follower. Drivers of object stores
                # raise exceptions of their own types.
                self._lease_seen = time.monotonic()
                if not has_failed:
                    what = "requests to cancel cannot be read: %s: %s; trying again"
                    logger.warning(what, type(error).__name__, error)
                has_failed = True
            if not self._first_read.done():
                self._first_read.set_result(None)
            if self._request or self._abandoned:
                self.wake()
                return
            is_slow = self._own.is_remote and not self.is_cancelled
            if self._hurry.wait(self._recorder.status.interval if is_slow else READ_INTERVAL) and not self._ended:
                time.sleep(READ_INTERVAL / 4)

    def _check_lease(self, now: float, orphan_timeout: float) -> None:
        if now < self._next_lease:
            return
        if self._own.is_remote:
            self._next_lease = now + min(orphan_timeout * LEASE_SHARE, LEASE_POLL_INTERVAL_MAX)
        lease = self._own.lease()
        bound = bound_of(lease)
        seconds = orphan_timeout if bound is None else min(orphan_timeout, bound)
        is_alone = self.retrier_gone.is_set()
        if is_alone:
            seconds = min(seconds, MISSED_RENEWALS * self._own.renewal_interval(seconds))
        if lease != self._lease:
            self._lease, self._lease_seen = lease, now
        elif now - self._lease_seen > seconds:
            why = "the process that would have retried the step has exited, and " if is_alone else ""
            name = "orphan_timeout=" if seconds == orphan_timeout else ""
            self._abandoned = f"{why}no process followed the run for {name}{seconds} s, so it cancelled itself"


class HangWatch:
    """Distinguishes a run that hangs from a slow one, by the progress of each rank and, if needed, by their stacks.

    A rank may compute alone after others have returned, such as rank 0 when it evaluates or saves a model: that is no
    hang, however long it takes. A rank counts as waiting only if its innermost call is a collective and its process
    uses no processor time.

    Attributes:
        stacks: The replies of ranks to the last request for their stacks.
    """

    def __init__(self, facts: Facts) -> None:
        """Creates a watch that has not received anything yet. The reports of the ranks are in ``facts``."""
        self._facts, self._returned = facts, facts.returned
        self._ranks = frozenset(range(facts.num_processes))
        self._progress: dict[int, tuple[int, float]] = {}
        self._beats: dict[int, float] = {}
        self.stacks: dict[int, Stack] = {}
        self._before: dict[int, Stack] = {}
        self._looked_at = 0.0
        self._waiting_since: float | None = None
        self._has_reported = False

    def begin(self, now: float) -> None:
        """Starts the clocks, since a rank has begun. A rank without heartbeats has some time to begin, too."""
        self._progress |= dict.fromkeys(self._ranks - self._progress.keys(), (-1, now + bounds.MEET_TIMEOUT()))

    def on_beat(self, rank: int, progress: int, now: float) -> None:
        """Records a rank's progress counter. One of a rank that has returned shows only that it is alive."""
        if rank in self._returned:
            self._beats[rank] = now
        elif rank not in self._progress or self._progress[rank][0] != progress:
            self._progress[rank] = progress, now

    def on_return(self, rank: int, now: float) -> None:
        """Records that a rank's code has returned, its last progress. While it is alive, it may store its value."""
        self._returned.add(rank)
        self._progress[rank], self._beats[rank] = (-1, now), now

    @property
    def texts(self) -> dict[int, str]:
        """The stack of each rank as text, or why there is none."""
        without = {rank: "it had returned" if rank in self._returned else NO_REPLY for rank in self._ranks}
        return dict(sorted((without | {rank: stack.text for rank, stack in self.stacks.items()}).items()))

    @property
    def _progress_at(self) -> float:
        return max((when for _, when in self._progress.values()), default=0.0)

    @property
    def _remaining(self) -> list[int]:
        return sorted(self._ranks - self._returned)

    def find(self, now: float, bound: float | None) -> tuple[str, list[int]] | None:
        """Returns why the run hangs, and for which ranks the others wait by their `stacks`; None if it does not hang.

        Args:
            now: Monotonic time.
            bound: Seconds without progress after which it hangs; None for the rule about returned ranks alone.
        """
        since, returned = self._waiting_since, name_ranks(list(self._returned))
        if since is not None and self._progress_at <= since <= now - RETURNED_HANG() + RETURNED_NOTICE():
            why = f"{name_ranks(self._remaining)} waited for {RETURNED_HANG():g} s in a collective that never ends"
            must = "a training must call every collective in every rank equally often"
            return f"{returned} returned, and {why} without {returned}: {must}", sorted(self._returned)
        if bound is None:
            return None
        if not self._remaining:
            silent = [rank for rank in sorted(self._ranks - self._facts.over) if now - self._beats[rank] > bound]
            why = f"{name_ranks(silent)} returned, and then sent no heartbeat for hang_timeout={bound} s"
            return (why, silent) if silent else None
        if now - self._progress_at <= bound:
            return None
        waiting = {rank for rank, stack in self.stacks.items() if is_waiting(stack.text)}
        return f"no rank made progress for hang_timeout={bound} s", sorted(self._ranks - waiting) if waiting else []

    def must_look(self, now: float) -> bool:
        """Returns True if some ranks have returned without other progress, and stacks show what the others do."""
        if not (self._returned and self._remaining) or now - self._progress_at < RETURNED_NOTICE():
            self._waiting_since, self._looked_at = None, 0.0
            self._before.clear()
            return False
        return now - self._looked_at >= RETURNED_NOTICE()

    def look(self, now: float) -> str | None:
        """Judges the `stacks` that were requested because of `must_look`.

        Returns:
            A line about what the ranks do that have not returned, the first time; else None.
        """
        remaining, still = self._remaining, now - self._progress_at
        is_still = bool(remaining) and still >= RETURNED_NOTICE()
        if not (is_still and all(self._waits(rank, now - self._looked_at) for rank in remaining)):
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        self._before, self._looked_at = dict(self.stacks), now
        if not is_still or self._has_reported:
            return None
        self._has_reported = True
        groups: dict[str, list[int]] = {}
        for rank in remaining:
            stack = self.stacks.get(rank)
            groups.setdefault(describe(stack.text) if stack else "did not answer", []).append(rank)
        places = "; ".join(f"{name_ranks(ranks)} {what}" for what, ranks in groups.items())
        return f"{name_ranks(list(self._returned))} returned, without other progress for {still:.0f} s: {places}"

    def _waits(self, rank: int, elapsed: float) -> bool:
        stack, before = self.stacks.get(rank), self._before.get(rank)
        if stack is None or not is_waiting(stack.text):
            return False
        if before is None:
            return True
        is_idle = stack.cpu is None or before.cpu is None or stack.cpu - before.cpu <= IDLE_SHARE * elapsed
        return is_idle and stack.text == before.text


def is_waiting(stack: str) -> bool:
    """Returns True if the innermost call of a stack waits for other ranks."""
    frames = _frames(stack)
    if not frames:
        return False
    path, _, function = frames[0]
    if function == "_engine_run_backward":
        return True
    return _NOT_WAITING not in path and any(sign in path for sign in _WAITING)


def describe(stack: str) -> str:
    """Returns whether a rank waits for others, and the line of user code at which it is."""
    own = next((frame for frame in _frames(stack) if not any(library in frame[0] for library in _LIBRARIES)), None)
    what = "waits in a collective" if is_waiting(stack) else "works"
    return f"{what}, {own[0].rpartition('/')[2]}:{own[1]} in {own[2]}" if own else what


def _frames(stack: str) -> list[tuple[str, int, str]]:
    found = map(_FRAME.search, stack.splitlines())
    return [(frame["path"], int(frame["line"]), frame["function"]) for frame in found if frame]
