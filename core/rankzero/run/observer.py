"""`Observer` reads the status of a run from a store that may fail, and determines whether its driver lives.

Why its process decides before its heartbeat: docs/architecture.md#a-process-that-can-be-queried-is-queried.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from rankzero import bounds, store
from rankzero.bounds import CLOCK_SKEW, DRIVER_DEAD_AFTER, STORE_OUTAGE
from rankzero.errors import EngineError, RunCancelledError, RunNotFoundError
from rankzero.host.processes import STOPPED, caught_signals, is_gone, process_namespace, process_state
from rankzero.run.directory import DRIVER_LOG, Submission
from rankzero.run.status import RunStatus

CANCEL = signal.SIGUSR1
"""Signal to a driver process that the end of its run was requested. The request is in the store, soon or already."""

STORE_PATIENCE = bounds.scaled(15.0)  # For which a follower retries to read a store that fails
DRIVER_LOG_TAIL = 15  # Last lines of a dead driver's log that the error shows
_MISSED = 3  # Number of heartbeats that a driver may miss

T = TypeVar("T")


class OwnDriver(Protocol):
    """Interface of a driver that this process started as a child process or a thread."""

    def poll(self) -> int | None:
        """Returns None while the driver lives."""

    def await_end(self, timeout: float) -> None:
        """Waits until the driver has ended, at most ``timeout`` seconds."""

    def cancel(self) -> None:
        """Makes the driver end the run on request, without the store."""

    def last_output(self) -> bytes:
        """Returns the end of what the driver's process has printed; empty for a thread."""


class Observer:
    """Observes one submission of a run for one process: `rankzero.RunHandle` without what a follower needs."""

    def __init__(self, own: Submission, driver: OwnDriver | None = None) -> None:
        """Makes an observer. Its methods access the store, and know the driver if this process has started it."""
        self.own = own
        self._driver = driver
        self._pid = os.getpid()
        self._beat = self._beat_seen = self._blind_until = 0.0
        self._last: RunStatus | None = None
        self._is_ending = False

    def cancel(self, receiver: Mapping[str, Any] | None = None, reason: str = "") -> None:
        """Requests the end of the run; call `wait` for the end. Does nothing if the run has ended.

        The request concerns only the submission that this handle was made for, and no later one.

        Args:
            receiver: The orchestrator's try whose end also ends the run, as in `offer`. Another try that follows the
                run by then finds this in `cancelled_for`, and may submit the run again.
            reason: The cause of the request, which the error of the run shows.
        """
        self._is_ending = True
        if self._driver and os.getpid() == self._pid:
            self._driver.cancel()
        if self._last:
            # The store may not answer now.
            _signal_driver(self._last)
        status = self._read()
        if status.final:
            return
        _signal_driver(status)
        self.own.request_cancel(receiver, reason)
        if "deploy_mode" in self.own.job.engine and not self.own.has_driver():
            # A driver that the cluster starts later finds the end, and exits.
            error = RunCancelledError("the run was cancelled before its driver started", requested=True)
            self.own.finish(replace(status, state="cancelled", error=error.to_json()))

    def status(self) -> RunStatus:
        """Returns the current state of the run.

        A run whose driver died is reported as failed, unless its end is recorded.
        """
        return self.judged(self._patiently(self._read))

    def _read(self) -> RunStatus:
        self._last = self.own.status()
        return self._last

    def judged(self, status: RunStatus, at_most: float = math.inf) -> RunStatus:
        """Returns a status that was just read; that of a run whose driver died as `status` reports it."""
        if status.final:
            return status
        is_silent, lives = self._is_silent(status), self.driver_lives(status)
        # A slow disk may delay the heartbeat of a living driver, so the process decides if it can be queried.
        if lives or (lives is None and not is_silent):
            return status
        # The driver may have written in the meantime, or this machine may have slept, so the status is read again.
        before, status = status, self._patiently(self._read, at_most)
        if status.final or status.heartbeat != before.heartbeat:
            return status
        if end := self._patiently(self.own.end, at_most):
            return end
        who = f"process {status.driver_pid} on {status.driver_host}" if status.driver_pid else "not started"
        died = "died without ending the run"
        if _process_state(status) in STOPPED:
            silence = f"it sent no heartbeat for {dead_after(status):.0f} s, and counts as dead"
            died = f"is stopped: {silence}. It has not ended the run"
        text = f"the driver of run {self.own.job.run_id} ({who}) {died}, which was {status.shown}"
        error = EngineError("\n".join([text, *self._driver_log_tail()]), code="RZ-2004")
        return replace(status, state="failed", error=error.to_json(), ended=status.heartbeat)

    def _driver_log_tail(self) -> list[str]:
        with contextlib.suppress(OSError):
            if self.own.is_remote:
                output = self._driver.last_output() if self._driver else b""
            else:
                output = store.read_bytes(self.own.path(DRIVER_LOG))
            return [f"  {line}" for line in output.decode("utf-8", "replace").splitlines()[-DRIVER_LOG_TAIL:]]
        return []

    def _patiently(self, read: Callable[[], T], at_most: float = math.inf) -> T:
        """Reads a store that may fail for a while: longer for the owner of a living driver, whose error ends the run.

        Then it is tried again for ``at_most`` seconds, but at least for `STORE_PATIENCE`.
        """

        def gives_up(error: Exception) -> bool:
            self._blind_until = time.monotonic()
            return isinstance(error, RunNotFoundError)

        owns = self._driver is not None and self._driver.poll() is None
        seconds = min(STORE_OUTAGE(), max(STORE_PATIENCE(), at_most)) if owns else STORE_PATIENCE()
        return store.patiently(read, seconds, bounds.STORE_RETRY_INTERVAL(), gives_up)

    def driver_lives(self, status: RunStatus) -> bool | None:
        """Returns whether the driver lives; None if this process cannot query it and only the heartbeat decides.

        A process that exists is alive even if the store rejects its heartbeats. A driver that is a thread of a process
        that may outlive it, such as a notebook, is left to its heartbeat. So is a stopped driver: when that is too old,
        its agents have ended as well.
        """
        if self._driver is not None and os.getpid() == self._pid:
            # It also removes a child process that has exited.
            lives = self._driver.poll() is None
            if status.driver_pid is None or status.driver_thread:
                return lives
        job = self.own.job
        if status.driver_pid is None and job.owner and not job.queue_time and is_gone(job.owner):
            # Before the driver's first status: the run ends with its owner, who may outlive the driver.
            return False
        if not (state := _process_state(status)):
            return False if state is None else None
        return None if status.driver_thread or state in STOPPED else True

    def _is_silent(self, status: RunStatus) -> bool:
        """Returns True if the heartbeat has not changed for so long that its driver counts as dead.

        The clock is monotonic, since the wall clock advances while a laptop or a VM sleeps, and a driver there does
        not. The wall clock is used only for the first status, and only if the driver's process is not visible.
        """
        is_first = not self._beat_seen
        if status.heartbeat != self._beat:
            self._beat, self._beat_seen = status.heartbeat, time.monotonic()
        # While the status could not be read, the time does not count against the driver.
        unchanged = time.monotonic() - max(self._beat_seen, self._blind_until)
        age = time.time() - status.heartbeat if is_first and not _process_state(status) else 0.0
        bound = dead_after(status)
        # The clocks of the two hosts may differ.
        return unchanged > bound or age > bound + CLOCK_SKEW


def dead_after(status: RunStatus) -> float:
    """Returns the seconds without a heartbeat after which the driver that wrote a status counts as dead.

    A driver that a cluster has not started yet has `RunStatus.queue_time` seconds until its first heartbeat.
    """
    return max(DRIVER_DEAD_AFTER(), _MISSED * status.interval, status.queue_time)


def _process_state(status: RunStatus) -> str | None:
    """Returns the state of the driver's process; None if it has exited, empty if this process cannot query it."""
    if status.driver_pid is None or status.driver_namespace != process_namespace():
        return ""
    return process_state(status.driver_pid, status.driver_start)


def _signal_driver(status: RunStatus) -> None:
    """Sends `CANCEL` to a driver that is a process of this machine, since it polls the run directory seldom.

    A driver that is a thread polls: the process is its caller's. So does one whose start is not known, as on macOS:
    another process may have its id.
    """
    is_known = status.driver_start is not None and not status.driver_thread
    if status.driver_pid is not None and is_known and not status.final and _process_state(status):
        signal_cancel(status.driver_pid)


def signal_cancel(pid: int) -> None:
    """Sends `CANCEL` to a driver process, but not while it is just starting and has no handler yet."""
    if CANCEL in (caught_signals(pid) or ()):
        with contextlib.suppress(OSError):
            os.kill(pid, CANCEL)
