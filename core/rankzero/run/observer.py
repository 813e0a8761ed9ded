"""`Observer`: what a process can see of a run: its status, in a store that may fail, and whether its driver lives."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from rankzero import store
from rankzero.bounds import DRIVER_DEAD_AFTER, STORE_OUTAGE
from rankzero.errors import EngineError, RunNotFoundError
from rankzero.host.processes import STOPPED, process_namespace, process_state
from rankzero.run.current import CurrentStatus
from rankzero.run.directory import RunDirectory, RunStatus
from rankzero.run.liveness import HeartbeatWatch, process_lives
from rankzero.run.pace import SHORTEST_PACE

T = TypeVar("T")

STORE_PATIENCE = DRIVER_DEAD_AFTER
"""Seconds for which a follower tries again to read a store that fails."""

DRIVER_LOG_TAIL = 15
"""Lines of a dead driver's log that its error shows."""


class OwnDriver(Protocol):
    """A driver that this process started: a child process, or a thread."""

    @property
    def pid(self) -> int:
        """Of its process."""

    def poll(self) -> int | None:
        """None while it lives."""

    def await_end(self, timeout: float) -> None:
        """Returns when it has ended, or after so many seconds."""


class Observer:
    """One process's view of one run."""

    def __init__(
        self, run: RunDirectory, driver: OwnDriver | None, submission: int, current: CurrentStatus | None = None
    ) -> None:
        """Reads nothing.

        Args:
            run: The run.
            driver: The run's driver, if this process has started it.
            submission: Which that drives.
            current: Reads the status of the run's own submission.
        """
        self._run = run
        self._driver = driver
        self._submission = submission
        self._heartbeat = HeartbeatWatch()
        self._current = current or CurrentStatus(run)

    def status(self, patience: float) -> RunStatus:
        """The run's state now, from a store that may fail for so many seconds.

        A run whose driver died is reported as failed, or as succeeded if that was certain before.
        """
        status = self.patiently(self._current.read, patience)
        if status.final or not self._driver_died(status):
            return status
        # It may have written between the two looks, or this machine has slept there.
        before, status = status, self.patiently(self._current.read, patience)
        if status.final or status.heartbeat != before.heartbeat:
            return status
        if status.certain:
            return replace(status, state="succeeded", ended=status.heartbeat)
        who = f"process {status.driver_pid} on {status.driver_host}" if status.driver_pid else "not started"
        text = f"the driver of run {self._run.directory.rsplit('/', 1)[-1]} ({who}) died without ending the run"
        error = EngineError("\n".join([text, *self._driver_log_tail()]))
        return replace(status, state="failed", error=error.to_json(), ended=status.heartbeat)

    def _driver_log_tail(self) -> list[str]:
        with contextlib.suppress(OSError):
            text = store.read_bytes(self._run.path("driver.log")).decode("utf-8", "replace")
            return [f"  {line}" for line in text.splitlines()[-DRIVER_LOG_TAIL:]]
        return []

    @property
    def patience(self) -> float:
        """Seconds for which a store may fail: whoever owns a driver that lives would end its training by giving up."""
        owns = self._driver is not None and self._driver.poll() is None
        return STORE_OUTAGE if owns else STORE_PATIENCE

    def patiently(self, read: Callable[[], T], patience: float | None = None) -> T:
        """Reads the store, again while it fails for a moment: a follower's trouble must not end a training.

        Raises:
            RunNotFoundError: there is no run.
            Exception: the store's, after so many seconds; after `patience` by default.
        """

        def gives_up(error: Exception) -> bool:
            self._heartbeat.note_blindness()
            return isinstance(error, RunNotFoundError)

        return store.patiently(read, self.patience if patience is None else patience, SHORTEST_PACE, gives_up)

    def driver_lives(self, status: RunStatus) -> bool | None:
        """True or False if this process can query the driver; None where only the heartbeat can decide.

        A driver of this process's own is a child process or a thread, and its end is known. A store that takes no
        heartbeat for minutes does not end its training.
        """
        if self._driver is not None and status.submission == self._submission:
            if self._driver.poll() is not None:
                ours = (process_namespace(), self._driver.pid)
                # It may have handed the run to a driver elsewhere.
                is_another = status.driver_pid is not None and (status.driver_namespace, status.driver_pid) != ours
                return process_lives(status) if is_another else False
            # A stopped child loses its agents. A thread stops together with this code.
            is_stopped = self._driver.pid != os.getpid() and process_state(self._driver.pid, None) in STOPPED
            return None if is_stopped else True
        if status.driver_pid is None and (process := self._run.starting(status.submission)):
            status = replace(
                status,
                driver_pid=process["pid"],
                driver_start=process["start"],
                driver_namespace=process["namespace"],
            )
        return process_lives(status)

    def _driver_died(self, status: RunStatus) -> bool:
        is_silent = self._heartbeat.is_silent(status)
        lives = self.driver_lives(status)
        # A slow disk may delay the heartbeat of a driver that lives.
        return is_silent if lives is None else not lives

    def patience_until(self, deadline: float | None) -> float:
        """`patience`, and no longer than until then, unless the store has less than any follower gives it."""
        left = math.inf if deadline is None else max(0.0, deadline - time.monotonic())
        return min(self.patience, max(STORE_PATIENCE, left))
