"""`StatusWriter`: the thread that writes a submission's status and its heartbeat, however slow the store is."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from rankzero import bounds
from rankzero.bounds import DRIVER_DEAD_AFTER
from rankzero.run.current import owns
from rankzero.run.directory import RunDirectory, RunStatus

logger = logging.getLogger(__name__)


class StatusWriter:
    """Keeps the status, and writes it when it has changed and with every heartbeat.

    Writes are asynchronous, so neither a slow store nor a large result makes a live driver look dead or blocks it.
    Writes are sequential, so none overtakes a later one. A refused write is repeated with the next heartbeat.
    """

    def __init__(self, run: RunDirectory, status: RunStatus) -> None:
        """Prepares the thread, which the first `change` starts.

        Args:
            run: The run.
            status: The first status.
        """
        self._run = run
        self._changed = threading.Condition()
        self._has_changed = False
        self._unwritten: list[Future[None]] = []
        self._thread = threading.Thread(target=self._work, name="rankzero-heartbeat", daemon=True)
        self.status = status
        self.superseded = False
        """True if another submission has this run now: this driver has lost the right to write."""
        self.problem: Exception | None = None
        """The error of the last write; None if it succeeded."""

    def note(self, **changes: Any) -> None:
        """Changes the status, which the next heartbeat writes."""
        with self._changed:
            self.status = replace(self.status, **changes)

    def change(self, **changes: Any) -> Future[None]:
        """Changes the status and writes it immediately. No write follows a final status.

        Args:
            changes: New values of fields of the status.

        Returns:
            A future that completes once the change is written.
        """
        written: Future[None] = Future()
        with self._changed:
            self.status = replace(self.status, **changes)
            self._has_changed = True
            self._unwritten.append(written)
            self._changed.notify_all()
        if not self._thread.ident:
            self._thread.start()
        return written

    def _work(self) -> None:
        next_beat, next_check = time.monotonic() + self._beat_interval(), time.time() + DRIVER_DEAD_AFTER
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_changed, max(0.0, next_beat - time.monotonic()))
                self._has_changed, due = False, list(self._unwritten)
                status = self.status = replace(self.status, heartbeat=time.time())
            try:
                # Wall-clock time, since it also advances while a machine sleeps.
                if status.certain or not self._run.is_remote or time.time() >= next_check:
                    self._check_superseded()
                    # Each check is a request to an object store, and no driver is replaced sooner while it writes.
                    next_check = time.time() + DRIVER_DEAD_AFTER
                if not self.superseded:
                    self._run.write_status(status)
            except Exception as error:
                # Drivers of object stores raise exceptions of their own types.
                if self.problem is None:
                    logger.warning("the status could not be written; trying again", exc_info=True)
                self.problem = error
                next_beat = time.monotonic() + (
                    bounds.OUTCOME_RETRY_INTERVAL if status.certain else self._beat_interval()
                )
                continue
            self.problem = None
            next_beat = time.monotonic() + self._beat_interval()
            with self._changed:
                del self._unwritten[: len(due)]
            for written in due:
                written.set_result(None)
            if status.final:
                return

    def _beat_interval(self) -> float:
        """Returns the seconds between heartbeats, longer on an object store, where writes of lines carry most."""
        return self.status.interval + (bounds.HEARTBEAT_DELAY if self._run.is_remote else 0.0)

    def _check_superseded(self) -> None:
        """Checks whether another submission or another run has the directory by now."""
        self.superseded = not owns(self._run, self.status.submission, self.status.nonce)
