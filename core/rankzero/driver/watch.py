"""`Inbox` and `Watch`: the requests and events that end a run from outside, whatever its attempts are doing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from rankzero import bounds
from rankzero.driver.recorder import Recorder
from rankzero.errors import RunCancelledError, RunTimeoutError
from rankzero.run.directory import Submission, bound_of
from rankzero.run.lease import interval_of
from rankzero.threads import ActionThread, reply_of

logger = logging.getLogger(__name__)

READ_INTERVAL = 0.25  # Seconds between two reads of a run directory on a disk, where a request to cancel may appear
REASON_TIMEOUT = bounds.stretched(0.9)  # To read the reason of a cancel, which its process writes after the signal
LEASE_POLL_INTERVAL_MAX = 30.0  # Most seconds between two reads of a lease on an object store
LEASE_SHARE = 0.1  # Share of the lease's time between two of them, where each is a request
CHECK_INTERVAL = 0.5  # Most seconds between two checks of whether the run must end
MISSED_RENEWALS = 3  # Renewals that the last follower may miss: half a minute, three minutes on an object store

T = TypeVar("T")


class Inbox:
    """Wakes the coroutine of a run, and has what other threads, processes and signals want of it."""

    def __init__(self) -> None:
        self.interrupted: str | None = None
        self.is_cancelled = False
        self.is_retrier_gone = False
        """True once the process that would start the next try has exited, so only a present follower keeps the run
        alive."""
        self.called = asyncio.Event()
        """Set in the event loop once the run must end, though perhaps later than `is_called`."""
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self) -> None:
        """Makes later calls wake the event loop that runs now."""
        self._loop = asyncio.get_running_loop()
        if self.is_called:
            self.called.set()

    @property
    def is_called(self) -> bool:
        """True once the run must end."""
        return self.is_cancelled or self.interrupted is not None

    def interrupt(self, reason: str) -> None:
        """Asks the driver to cancel the run. Threads and signal handlers may call it."""
        self.interrupted = self.interrupted or reason
        self._call(self.called)

    def cancel(self) -> None:
        """Cancels the run on request, also if the store does not answer. Threads and signal handlers may call it."""
        self.is_cancelled = True
        self._call(self.called)

    def note_retrier_gone(self) -> None:
        """Records that the process that would start the next try has exited."""
        self.is_retrier_gone = True

    def wake(self, _: object = None) -> None:
        """Wakes the coroutine of the run. Threads, signal handlers and futures may call it."""
        self._call(self._changed)

    def _call(self, event: asyncio.Event) -> None:
        # The loop may be closed.
        with contextlib.suppress(RuntimeError):
            if self._loop:
                self._loop.call_soon_threadsafe(event.set)

    def change(self) -> None:
        """Wakes the coroutine of the run from its own loop."""
        self._changed.set()

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


class Watch:
    """Watches for a request to cancel, an interrupt, an abandoned lease and an end by another process.

    Attributes:
        inbox: Receives the interrupt, and wakes the coroutine of the run.
        thread: Reads the run directory, and hangs if the store does.
        error: The error of a run that must end; None while it may continue.
        started_at: Monotonic time at which every rank of an attempt had first started, from which ``timeout`` counts.
    """

    def __init__(self, own: Submission, recorder: Recorder, inbox: Inbox, *, leased: bool) -> None:
        """Prepares the watch; `follow` reads. The lease counts unless the driver watches its owner by other means."""
        self._own = own
        self._recorder = recorder
        self.inbox = inbox
        self._orphan_timeout = own.job.orphan_timeout if leased else None
        self._lease: bytes | None = None
        self._lease_seen = time.monotonic()
        self._next_lease = 0.0
        self._is_unreadable = False
        self._request: dict[str, Any] | None = None
        self._abandoned = ""
        self.thread = ActionThread("rankzero-watch")
        self.error: RunCancelledError | None = None
        self.started_at: float | None = None
        self._has_read = asyncio.Event()

    def check(self) -> None:
        """Raises RunCancelledError, with the reason, or RunTimeoutError if the run must end."""
        if self.is_called_off() and self.error:
            raise self.error.with_traceback(None)
        timeout = self._own.job.timeout
        if timeout and self.started_at is not None and time.monotonic() - self.started_at > timeout:
            raise RunTimeoutError(f"the run took longer than timeout={timeout} s and was ended")

    def is_called_off(self) -> bool:
        """Returns True if the run must end on request or because another driver has it."""
        if self._recorder.superseded and not self.error:
            self.error = RunCancelledError(
                "another process has ended this submission, since this driver seemed to be dead, or the run was removed"
            )
        return self.error is not None

    async def ready(self) -> None:
        """Waits until the directory was read once, briefly, since a run that is cancelled already must not begin."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REASON_TIMEOUT()):
                await self._has_read.wait()

    async def follow(self) -> None:
        """Reads the run directory again and again, until the run must end."""
        called = asyncio.create_task(self.inbox.called.wait())
        reading = asyncio.create_task(self._read_until_ended())
        try:
            await asyncio.wait([called, reading], return_when=asyncio.FIRST_COMPLETED)
            if self.inbox.is_cancelled:
                # The process that cancels the run writes its reason into the store after it has sent the signal.
                await asyncio.wait([reading], timeout=2 * REASON_TIMEOUT())
                self._request = self._request or {"reason": ""}
        finally:
            called.cancel()
            reading.cancel()
        if self._request is not None:
            text = ": ".join(filter(None, ["the run was cancelled on request", self._request["reason"]]))
            self.error = RunCancelledError(text, requested=True)
        elif reason := self.inbox.interrupted or self._abandoned:
            self.error = RunCancelledError(reason, requested=False)
        if self.error:
            self._recorder.note_cancelling()
        self._has_read.set()
        self.inbox.change()

    async def _read_until_ended(self) -> None:
        while True:
            await reply_of(self.thread.submit(self._read))
            if self._request or self._abandoned:
                return
            self._has_read.set()
            is_slow = self._own.is_remote and not self.inbox.is_called
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._recorder.status.interval if is_slow else READ_INTERVAL):
                    await (asyncio.sleep(READ_INTERVAL / 4) if self.inbox.is_called else self.inbox.called.wait())

    def _read(self) -> None:
        try:
            self._request = self._request or self._own.cancel_request()
            if self._orphan_timeout:
                self._check_lease(time.monotonic(), self._orphan_timeout)
            self._is_unreadable = False
        except Exception as error:
            # An unreadable store is neither a request to cancel nor an absent follower. Drivers of object stores
            # raise exceptions of their own types.
            self._lease_seen = time.monotonic()
            if not self._is_unreadable:
                logger.warning("requests to cancel cannot be read: %s: %s; trying again", type(error).__name__, error)
            self._is_unreadable = True

    def _check_lease(self, now: float, orphan_timeout: float) -> None:
        if now < self._next_lease:
            return
        if self._own.is_remote:
            self._next_lease = now + min(orphan_timeout * LEASE_SHARE, LEASE_POLL_INTERVAL_MAX)
        lease = self._own.lease()
        bound = bound_of(lease)
        seconds = orphan_timeout if bound is None else min(orphan_timeout, bound)
        if self.inbox.is_retrier_gone:
            seconds = min(seconds, MISSED_RENEWALS * interval_of(self._own, seconds))
        if lease != self._lease:
            self._lease, self._lease_seen = lease, now
        elif now - self._lease_seen > seconds:
            why = "the process that would have retried the step has exited, and " if self.inbox.is_retrier_gone else ""
            bound_text = f"orphan_timeout={seconds} s" if seconds == orphan_timeout else f"{seconds} s"
            self._abandoned = f"{why}no process followed the run for {bound_text}, so it cancelled itself"
