"""`Watch`: what may end a run from outside, whatever its attempts are doing."""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import Any

from rankzero.driver.recorder import Recorder
from rankzero.errors import RunCancelledError
from rankzero.job import Job
from rankzero.run.directory import RunDirectory
from rankzero.run.renewal import interval_of

logger = logging.getLogger(__name__)

TICK = 0.1
"""Seconds between two looks at deadlines and at the request to cancel."""

LEASE_SHARE = 0.1
"""How often the lease is read on an object store, where that is a request, in its own time."""

LEASE_INTERVAL = 30.0
"""Most seconds between two of these, since it may have been shortened."""

MISSED_RENEWALS = 3
"""Renewals that a follower may miss once no other try can come: half a minute, three minutes on an object store."""

DRIVER = -1
"""The "task" under which the driver's own threads put messages into the queue."""

INTERRUPT = "interrupt"

REQUEST_PATIENCE = 1.0
"""Seconds for which an object store is asked whether somebody requested the end that an interrupt asks for."""

_ON_REQUEST = "the run was cancelled on request"

Messages = queue.SimpleQueue[tuple[int, dict[str, Any]]]


class Inbox:
    """What other threads report to the driver. Each attempt has a queue of its own; an interrupt is for all."""

    def __init__(self) -> None:
        self.queue: Messages = queue.SimpleQueue()
        self.interrupted: str | None = None
        self.is_retrier_gone = False
        """The process that would start the next try has exited: only a follower that is there keeps the run alive."""

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
        self._orphan_timeout = job.orphan_timeout if leased else None
        self._lease = run.lease() if self._orphan_timeout else b""
        self._lease_seen = time.monotonic()
        self._next_look = self._next_lease = 0.0
        self._looker: threading.Thread | None = None
        self._is_requested = self._is_removed = False
        # On a disk that is cheap enough for each turn: a removed directory may be another run's soon.
        self._claim = b"" if run.is_remote else run.claim_text(job.submission)
        self._abandoned = ""

    def check(self) -> None:
        """Raises RunCancelledError, with the reason, if the run is to end. Cheap enough for every turn of a loop."""
        if self._inbox.interrupted:
            # Who cancels a run of this host wakes its driver by a signal.
            self._look(REQUEST_PATIENCE)
            reason = _ON_REQUEST if self._is_requested else self._inbox.interrupted
            raise RunCancelledError(reason, requested=self._is_requested)
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + (self._recorder.status.interval if self._run.is_remote else TICK)
            self._look()
        if self._recorder.superseded or self._is_removed:
            raise RunCancelledError(
                "the run directory belongs to another driver by now: it was removed, the run was submitted again, or "
                "this driver was thought to be dead"
            )
        if self._is_requested:
            raise RunCancelledError(_ON_REQUEST, requested=True)
        if self._abandoned:
            raise RunCancelledError(self._abandoned)

    def _look(self, patience: float = 0.0) -> None:
        """Looks into the run directory; at an object store in a thread, for which nobody waits longer than so."""
        if not self._run.is_remote:
            self._read()
            return
        if self._looker is None or not self._looker.is_alive():
            self._looker = threading.Thread(target=self._read, name="rankzero-watch", daemon=True)
            self._looker.start()
        self._looker.join(patience)

    def _read(self) -> None:
        try:
            if self._claim and self._run.claim_text(self._submission) != self._claim:
                self._is_removed = True
            self._is_requested = self._is_requested or self._run.cancel_requested(self._submission)
            if self._orphan_timeout and time.monotonic() >= self._next_lease:
                if self._run.is_remote:
                    self._next_lease = time.monotonic() + min(self._orphan_timeout * LEASE_SHARE, LEASE_INTERVAL)
                self._check_lease(time.monotonic(), self._orphan_timeout)
        except Exception:
            # A store that cannot be read is no request, and its time no follower's; object stores have exceptions of
            # their own.
            self._lease_seen = time.monotonic()
            logger.warning("cannot look for a request to cancel", exc_info=True)

    def _check_lease(self, now: float, orphan_timeout: float) -> None:
        lease = self._run.lease()
        _, _, bound = lease.partition(b" ")
        seconds = min(orphan_timeout, float(bound)) if bound else orphan_timeout
        if self._inbox.is_retrier_gone:
            seconds = min(seconds, MISSED_RENEWALS * interval_of(self._run, seconds))
        if lease != self._lease:
            self._lease, self._lease_seen = lease, now
        elif now - self._lease_seen > seconds:
            who = "its last follower was absent for " if bound else "nobody followed the run for orphan_timeout="
            if self._inbox.is_retrier_gone:
                who = "the process that would have retried the step has exited, and nobody followed the run for "
            self._abandoned = f"{who}{seconds} s, so it cancelled itself"
