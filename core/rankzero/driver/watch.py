"""`Watch`: the requests and events that end a run from outside, whatever its attempts are doing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from rankzero import bounds
from rankzero.driver.recorder import Recorder
from rankzero.errors import RunCancelledError, RunTimeoutError
from rankzero.run.directory import Submission, bound_of
from rankzero.threads import reply_of

logger = logging.getLogger(__name__)

READ_INTERVAL = 0.25  # Seconds between two reads of a run directory on a disk, where a request to cancel may appear
REASON_TIMEOUT = bounds.stretched(1.8)  # To read the reason of a cancel, which its process writes after the signal
LEASE_POLL_INTERVAL_MAX = 30.0  # Most seconds between two reads of a lease on an object store
LEASE_SHARE = 0.1  # Share of the lease's time between two of them, where each is a request
CHECK_INTERVAL = 0.5  # Most seconds between two checks of whether the run must end
MISSED_RENEWALS = 3  # Renewals that the last follower may miss: half a minute, three minutes on an object store

T = TypeVar("T")


class Watch:
    """Knows why a run must end: a request, an interrupt, an abandoned lease or an end by another process.

    A thread reads the run directory, and hangs if the store does. The coroutine of the run checks what it has found.

    Attributes:
        interrupted: Why the run must end without a request.
        is_cancelled: True once the run must end on request.
        retrier_gone: Set once the process that would start the next try has exited, so only a present follower keeps
            the run alive.
        started_at: Monotonic time at which every rank of an attempt had first started, from which ``timeout`` counts.
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
