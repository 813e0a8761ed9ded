"""`Watch`: what may end a run from outside, whatever its attempts are doing."""

from __future__ import annotations

import logging
import queue
import time
from typing import Any

from rankzero.driver.recorder import Recorder
from rankzero.errors import RunCancelledError
from rankzero.job import Job
from rankzero.run.directory import RunDirectory

logger = logging.getLogger(__name__)

TICK = 0.1
"""Seconds between two looks at deadlines and at the request to cancel."""

REMOTE_TICK = 2.0
"""The same for a run directory on an object store, where a look is a request."""

DRIVER = -1
"""The "task" under which the driver's own threads put messages into the queue."""

INTERRUPT = "interrupt"

_ON_REQUEST = "the run was cancelled on request"

Messages = queue.SimpleQueue[tuple[int, dict[str, Any]]]


class Inbox:
    """What other threads report to the driver. Each attempt has a queue of its own; an interrupt is for all."""

    def __init__(self) -> None:
        self.queue: Messages = queue.SimpleQueue()
        self.interrupted: str | None = None

    def renew(self) -> Messages:
        """A new queue, in which nothing of an earlier attempt can arrive."""
        self.queue = queue.SimpleQueue()
        return self.queue

    def interrupt(self, reason: str) -> None:
        """Asks the driver to cancel the run. From any thread, and from signal handlers."""
        self.interrupted = self.interrupted or reason
        self.queue.put((DRIVER, {"type": INTERRUPT}))


class Watch:
    """Looks for a request to cancel, an interrupt, an abandoned lease, a newer submission."""

    def __init__(self, run: RunDirectory, job: Job, recorder: Recorder, inbox: Inbox, *, leased: bool) -> None:
        """Starts the lease's clock.

        Args:
            run: The run.
            job: Its job, for ``orphan_timeout``.
            recorder: Knows whether another submission took over.
            inbox: Holds the interrupt.
            leased: False if the driver's owner is known by other means.
        """
        self._run = run
        self._submission = job.submission
        self._recorder = recorder
        self._inbox = inbox
        self._interval = REMOTE_TICK if run.is_remote else TICK
        self._orphan_timeout = job.orphan_timeout if leased else None
        self._lease = run.lease() if self._orphan_timeout else b""
        self._lease_seen = time.monotonic()
        self._next_look = 0.0

    def check(self) -> None:
        """Raises RunCancelledError, with the reason, if the run is to end. Cheap enough for every turn of a loop."""
        if self._inbox.interrupted:
            # Who cancels a run of this host wakes its driver by a signal.
            requested = self._is_requested()
            raise RunCancelledError(_ON_REQUEST if requested else self._inbox.interrupted, requested=requested)
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + self._interval
        if self._recorder.superseded:
            raise RunCancelledError("another submission of this run took over, since this driver seemed dead")
        try:
            if self._run.cancel_requested(self._submission):
                raise RunCancelledError(_ON_REQUEST, requested=True)
            if self._orphan_timeout:
                self._check_lease(now, self._orphan_timeout)
        except RunCancelledError:
            raise
        except Exception:
            # A store that cannot be read for a moment is no request; object stores have exceptions of their own.
            logger.warning("cannot look for a request to cancel", exc_info=True)

    def _is_requested(self) -> bool:
        try:
            return self._run.cancel_requested(self._submission)
        except Exception:
            return False

    def _check_lease(self, now: float, orphan_timeout: float) -> None:
        lease = self._run.lease()
        _, _, bound = lease.partition(b" ")
        seconds = min(orphan_timeout, float(bound)) if bound else orphan_timeout
        if lease != self._lease:
            self._lease, self._lease_seen = lease, now
        elif now - self._lease_seen > seconds:
            who = "its last follower was absent for " if bound else "nobody followed the run for orphan_timeout="
            raise RunCancelledError(f"{who}{seconds} s, so it cancelled itself")
