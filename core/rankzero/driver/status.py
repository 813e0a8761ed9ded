"""`StatusWriter`: the one thread that writes a submission's status, with a heartbeat, however long the store takes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rankzero.bounds import DRIVER_DEAD_AFTER
from rankzero.run.current import owns
from rankzero.run.directory import RunDirectory, RunStatus

logger = logging.getLogger(__name__)

_FLUSH_TIME = 1.0
"""Seconds by which a heartbeat to an object store is late, so that no two are written for one."""

_CERTAIN_INTERVAL = 0.25
"""Seconds between two tries to write a status whose outcome is certain."""


class StatusWriter:
    """Holds the status, and writes it when it has changed and with every heartbeat.

    Nobody waits for a write who does not ask to, so neither a slow store nor a large result on its way there makes a
    live driver look dead, or deaf. One write follows the other: none overtakes a later one. What the store refuses is
    tried again with the next heartbeat.
    """

    def __init__(self, run: RunDirectory, status: RunStatus) -> None:
        """Nothing is written before the first `change`.

        Args:
            run: The run.
            status: The first status.
        """
        self._run = run
        self._changed = threading.Condition()
        self._wanted = self._tried = self._written = 0
        self._stopped = False
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self._thread = threading.Thread(target=self._work, name="rankzero-heartbeat", daemon=True)
        self.status = status
        self.superseded = False
        """True if another submission has this run now: this driver has lost the right to write."""
        self.problem: Exception | None = None
        """Why the last write failed."""

    def note(self, **changes: Any) -> None:
        """Changes the status; the next heartbeat writes it."""
        with self._changed:
            self.status = replace(self.status, **changes)

    def change(self, *, then: Callable[[], None] | None = None, **changes: Any) -> None:
        """Changes the status, and has it written now. A final one is the last.

        Args:
            then: Called in the writer's thread when it is written.
            changes: Fields of the status.
        """
        with self._changed:
            self.status = replace(self.status, **changes)
            self._wanted += 1
            if then:
                self._waiting.append((self._wanted, then))
            self._changed.notify_all()
        if not self._thread.ident:
            self._thread.start()

    def stop(self, timeout: float = DRIVER_DEAD_AFTER) -> None:
        """Writes nothing more; waits for so long for a write that is under way."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread.ident:
            self._thread.join(timeout)

    def await_written(self, timeout: float) -> bool:
        """True as soon as every change until now is written, or need not be any more; False if the time is up."""
        with self._changed:
            wanted = self._wanted
            return self._changed.wait_for(lambda: self._written >= wanted, timeout)

    def _work(self) -> None:
        next_beat, next_check = time.monotonic() + self._beat_interval(), time.time() + DRIVER_DEAD_AFTER
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._stopped or self._wanted > self._tried, max(0.0, next_beat - time.monotonic())
                )
                if self._stopped:
                    return
                self._tried = wanted = self._wanted
                status = self.status = replace(self.status, heartbeat=time.time())
            try:
                # By the clock that goes on while a machine sleeps.
                if status.certain or not self._run.is_remote or time.time() >= next_check:
                    self._check_superseded()
                    # A request of an object store. Nobody takes over sooner from a driver that writes.
                    next_check = time.time() + DRIVER_DEAD_AFTER
                if not self.superseded:
                    self._run.write_status(status)
            except Exception as error:
                # Drivers of object stores have exceptions of their own.
                if self.problem is None:
                    logger.warning("the status could not be written; trying again", exc_info=True)
                self.problem = error
                next_beat = time.monotonic() + (_CERTAIN_INTERVAL if status.certain else self._beat_interval())
                continue
            self.problem = None
            next_beat = time.monotonic() + self._beat_interval()
            with self._changed:
                self._written = wanted
                self._changed.notify_all()
                due = [then for number, then in self._waiting if number <= wanted]
                self._waiting = [(number, then) for number, then in self._waiting if number > wanted]
            for then in due:
                then()
            if status.final:
                return

    def _beat_interval(self) -> float:
        """On an object store whoever flushes lines writes the status with them, unless that takes long."""
        return self.status.interval + (_FLUSH_TIME if self._run.is_remote else 0.0)

    def _check_superseded(self) -> None:
        """Finds out whether others declared this driver dead, or gave its directory to another run, meanwhile."""
        self.superseded = not owns(self._run, self.status.submission, self.status.nonce)
