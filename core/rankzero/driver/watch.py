"""`Watch`: the requests and events that end a run from outside, whatever its attempts are doing."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

from rankzero import bounds
from rankzero.channel.messages import Message, decode
from rankzero.driver.recorder import Recorder
from rankzero.engines.base import ActionThread
from rankzero.errors import RunCancelledError
from rankzero.run.directory import Submission, bound_of
from rankzero.run.lease import interval_of

logger = logging.getLogger(__name__)

LEASE_POLL_INTERVAL_MAX = 30.0  # Most seconds between two reads of a lease on an object store
LEASE_SHARE = 0.1  # Share of the lease's time between two of them, where each is a request
MISSED_RENEWALS = 3  # Renewals that the last follower may miss: half a minute, three minutes on an object store
BACKLOG = 256  # Most messages that wait for the driver before agents have to hold back their log lines


class Received(NamedTuple):
    """A message of the agent of a task, or of one of its ranks."""

    task: int
    local_rank: int | None
    message: Message


class Mailbox:
    """The messages of the agents of one attempt, and wake-ups by work that other threads have completed."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Received | None] = queue.SimpleQueue()

    def put(self, task: int, wire: Mapping[str, Any]) -> None:
        """Adds a message of an agent. Raises FrameError if it is malformed."""
        self._items.put(Received(task, wire.get("local_rank"), decode(wire)))

    def wake(self, _: object = None) -> None:
        """Ends the driver's wait. Threads, signal handlers and futures may call it."""
        self._items.put(None)

    def has_room(self) -> bool:
        """Returns False if agents have to hold back their log lines."""
        return self._items.qsize() < BACKLOG

    @property
    def is_empty(self) -> bool:
        """True if every message so far was received."""
        return self._items.empty()

    def receive(self, timeout: float) -> Iterator[Received]:
        """Yields the messages that have arrived, at most `BACKLOG` of them.

        Args:
            timeout: Seconds to wait for the first message or for a wake-up.
        """
        for _ in range(BACKLOG):
            try:
                item = self._items.get(timeout=timeout) if timeout else self._items.get(False)
            except queue.Empty:
                return
            if item:
                yield item
            timeout = 0.0


class Inbox:
    """The mailbox of the current attempt, and an interrupt, which applies to all attempts."""

    def __init__(self) -> None:
        self.mailbox = Mailbox()
        self.interrupted: str | None = None
        self.is_cancelled = False
        self.is_retrier_gone = False
        """True once the process that would start the next try has exited, so only a present follower keeps the run
        alive."""

    def note_retrier_gone(self) -> None:
        """Records that the process that would start the next try has exited."""
        self.is_retrier_gone = True

    def renew(self) -> Mailbox:
        """Creates and returns a new mailbox, which messages of an earlier attempt cannot reach."""
        self.mailbox = Mailbox()
        return self.mailbox

    def wake(self, _: object = None) -> None:
        """Ends the driver's wait. Threads, signal handlers and futures may call it."""
        self.mailbox.wake()

    def wait(self, timeout: float) -> None:
        """Waits for a wake-up, at most ``timeout`` seconds."""
        for _ in self.mailbox.receive(timeout):
            pass

    def interrupt(self, reason: str) -> None:
        """Asks the driver to cancel the run. Threads and signal handlers may call it."""
        self.interrupted = self.interrupted or reason
        self.wake()

    def cancel(self) -> None:
        """Cancels the run on request, also if the store does not answer. Threads and signal handlers may call it."""
        self.is_cancelled = True
        self.wake()


class Watch:
    """Watches for a request to cancel, an interrupt, an abandoned lease and an end by another process."""

    def __init__(
        self,
        own: Submission,
        recorder: Recorder,
        inbox: Inbox,
        *,
        leased: bool,
        note_cancelling: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts the lease's clock.

        Args:
            own: The submission.
            recorder: Reports whether another process has ended it.
            inbox: Receives the interrupt.
            leased: False if the driver watches its owner by other means.
            note_cancelling: Called before `check` ends the run without a request in the store.
        """
        self._own = own
        self._recorder = recorder
        self._inbox = inbox
        self._note_cancelling = note_cancelling
        self._orphan_timeout = own.job.orphan_timeout if leased else None
        self._lease = own.lease() if self._orphan_timeout else b""
        self._lease_seen = time.monotonic()
        self._is_unreadable = False
        self._next_poll = self._next_lease = 0.0
        self.thread = ActionThread("rankzero-watch")
        """Reads the run directory, and hangs if the store does."""
        self._poll_result: Future[None] = Future()
        self._poll_result.set_result(None)
        self._is_lost = False
        self._request: dict[str, Any] | None = None
        self._abandoned = ""
        self._interrupted: RunCancelledError | None = None

    def check(self) -> None:
        """Raises RunCancelledError, with the reason, if the run must end. Cheap enough for every pass of a loop."""
        now = time.monotonic()
        if self._inbox.interrupted or self._inbox.is_cancelled:
            self._interrupted = self._interrupted or self._interrupted_end()
            raise self._interrupted.with_traceback(None)
        if now >= self._next_poll:
            self._next_poll = now + (self._recorder.status.interval if self._own.is_remote else bounds.TICK)
            self._poll()
        if self._recorder.superseded or self._is_lost:
            raise RunCancelledError(
                "another process has ended this submission, since this driver seemed to be dead, or the run was removed"
            )
        if error := self._requested_end():
            raise error
        if self._abandoned:
            raise self._own_end(self._abandoned)

    def _interrupted_end(self) -> RunCancelledError:
        # The process that cancels the run writes its reason into the store after it has sent the signal.
        deadline = time.monotonic() + 2 * bounds.CANCEL_REQUEST_TIMEOUT()
        for _ in range(2):
            # The first read may have begun before the request was written.
            self._poll(bounds.CANCEL_REQUEST_TIMEOUT())
        while self._inbox.is_cancelled and self._request is None and time.monotonic() < deadline:
            time.sleep(bounds.POLL_INTERVAL_SHORT)
            self._poll(bounds.POLL_INTERVAL_SHORT)
        if self._inbox.is_cancelled and self._request is None:
            self._request = {"reason": ""}
            self._note_cancelling()
        return self._requested_end() or self._own_end(self._inbox.interrupted or "")

    def _requested_end(self) -> RunCancelledError | None:
        if self._request is None:
            return None
        text = ": ".join(filter(None, ["the run was cancelled on request", self._request["reason"]]))
        return RunCancelledError(text, requested=True)

    def _own_end(self, reason: str) -> RunCancelledError:
        self._note_cancelling()
        return RunCancelledError(reason, requested=False)

    def is_called_off(self) -> bool:
        """Returns True if the run must end on request or because another driver has it."""
        try:
            self.check()
        except RunCancelledError:
            return True
        return False

    def _poll(self, timeout: float = 0.0) -> None:
        """Polls the run directory; waits ``timeout`` seconds at most, and for one poll at a time."""
        if self._poll_result.done():
            self._poll_result = self.thread.submit(self._read)
            # A disk replies immediately.
            timeout = timeout if self._own.is_remote else bounds.CANCEL_REQUEST_TIMEOUT()
        wait([self._poll_result], timeout)

    def _read(self) -> None:
        try:
            # On an object store, where each look is a request, the recorder looks.
            self._is_lost = self._is_lost or (not self._own.is_remote and self._own.is_lost())
            self._request = self._request or self._own.cancel_request()
            if self._orphan_timeout and time.monotonic() >= self._next_lease:
                if self._own.is_remote:
                    self._next_lease = time.monotonic() + min(
                        self._orphan_timeout * LEASE_SHARE, LEASE_POLL_INTERVAL_MAX
                    )
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
        lease = self._own.lease()
        bound = bound_of(lease)
        seconds = orphan_timeout if bound is None else min(orphan_timeout, bound)
        is_shortened = seconds < orphan_timeout
        if self._inbox.is_retrier_gone:
            seconds = min(seconds, MISSED_RENEWALS * interval_of(self._own, seconds))
        if lease != self._lease:
            self._lease, self._lease_seen = lease, now
        elif now - self._lease_seen > seconds:
            who = "no process followed the run for orphan_timeout="
            if is_shortened:
                who = "its last follower was absent for "
            if self._inbox.is_retrier_gone:
                who = "the process that would have retried the step has exited, and no process followed the run for "
            self._abandoned = f"{who}{seconds} s, so it cancelled itself"
