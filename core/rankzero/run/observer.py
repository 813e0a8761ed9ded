"""`Observer` reads a run's status from a store that may fail, and determines whether the run's driver lives.

Why its process decides before its heartbeat: docs/architecture.md#a-process-that-can-be-queried-is-queried.
`CurrentStatus` reads the status of one submission by its nonce: a directory that was removed and submitted again starts
with submission 0, and the driver of the removed run may write a status into it until it notices the removal.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from rankzero import bounds, store
from rankzero.bounds import CLOCK_SKEW, DRIVER_DEAD_AFTER, DRIVER_STALE_AFTER, STORE_OUTAGE
from rankzero.errors import EngineError, RunCancelledError, RunNotFoundError
from rankzero.host.processes import STOPPED, caught_signals, process_namespace, process_state, thread_lives
from rankzero.run.directory import RunDirectory
from rankzero.run.status import RunStatus


class CurrentStatus:
    """Reads, or cancels, one submission of a run; ignores a status that another submission's driver wrote."""

    def __init__(self, run: RunDirectory) -> None:
        """Makes a reader; the first `read` accesses the store."""
        self._run = run
        self._accepted: RunStatus | None = None
        self._bound: tuple[int, str] | None = None

    def bind(self, submission: int, nonce: str) -> None:
        """Makes `read` follow this submission, and raise if the directory now belongs to another run of its name."""
        self._bound = (submission, nonce)

    @property
    def submission(self) -> int:
        """Returns the number given to `bind`, else binds to the directory's last submission. Raises like `read`."""
        # Not a cached_property: in Python 3.11 a store that does not answer would hold its lock for all handles.
        if self._bound is None:
            job = self._run.job()
            last = (job.submission, job.nonce)
            # A submission's status may be written before its job.
            with contextlib.suppress(RunNotFoundError):
                status = self.read()
                if status.submission > job.submission:
                    last = (status.submission, status.nonce)
            self._bound = last
        return self._bound[0]

    def read(self) -> RunStatus:
        """Returns the status of the submission given to `bind`, else of the directory's last submission.

        Raises:
            RunNotFoundError: the directory holds no run, or another run than the one given to `bind`.
        """
        status = self._run.status()
        known = self._accepted
        if not status.nonce or (known and known.nonce == status.nonce):
            self._accepted = status
            return status
        job = self._run.job()
        # A submission's status is written before its job, which makes it the last one. A submitter that was delayed may
        # have written an older job over that of a submission which has its driver.
        is_later = status.submission > job.submission and status.driver_pid is not None
        if self._bound:
            submission, nonce = self._bound
            if job.submission == submission and job.nonce != nonce != "" != job.nonce:
                raise self._removed()
            if max(job.submission, status.submission if is_later else 0) > submission:
                self._accepted = self._end_of(submission, nonce)
                return self._accepted
        if job.nonce in ("", status.nonce) or is_later:
            self._accepted = status
            return status
        if (found := self._run.outcome(job.submission)) and found.nonce == job.nonce:
            return found
        if known and known.nonce == job.nonce:
            return known
        return RunStatus(attempt=job.first_attempt, submission=job.submission, heartbeat=job.created, nonce=job.nonce)

    def _end_of(self, submission: int, nonce: str) -> RunStatus:
        """Returns how a submission ended that was followed by a later one."""
        if (found := self._run.outcome(submission)) and found.nonce == nonce:
            return found
        job = self._run.job_of(submission)
        if not (job and job.nonce in ("", nonce)):
            raise self._removed()
        text = f"submission {submission} of {self._run.directory} was followed by a later one, and its end is unknown"
        return RunStatus("failed", submission=submission, nonce=nonce, error=EngineError(text).to_json())

    def _removed(self) -> RunNotFoundError:
        return RunNotFoundError(
            f"the run in {self._run.directory} was removed, and another one was submitted under its name"
        )

    def outcome(self, status: RunStatus) -> RunStatus:
        """Returns the recorded outcome if a late write has replaced it by this status; else the status itself."""
        found = None if status.certain else self._run.outcome(status.submission)
        return found if found and found.nonce == status.nonce else status

    def cancel(self, receiver: Mapping[str, Any] | None, reason: str = "") -> None:
        """Requests the end of `submission`, as `RunHandle.cancel` describes."""
        if self._accepted:
            # The store may not answer now.
            self._signal_driver(self._accepted)
        status = self.read()
        if status.final or status.submission > self.submission:
            return
        self._signal_driver(status)
        self._run.request_cancel(self.submission, receiver, reason)
        job = self._run.job() if status.driver_pid is None else None
        is_for_a_cluster = job and job.submission == self.submission and "deploy_mode" in job.engine
        if is_for_a_cluster and self._run.claim_driver(self.submission):
            # If the cluster starts the driver later, it finds the submission claimed and exits.
            error = RunCancelledError("the run was cancelled before its driver started", requested=True)
            ended = replace(status, state="cancelled", error=error.to_json(), ended=time.time())
            self._run.write_status(ended)

    def _signal_driver(self, status: RunStatus) -> None:
        """Sends `CANCEL` to a driver that is a process of this machine, since it polls the run directory seldom.

        A driver that is a thread polls: the process is its caller's. So does one whose start is not known, as on macOS:
        another process may have its id.
        """
        pid, start = status.driver_pid, status.driver_start
        if pid is None or start is None or status.driver_thread or status.driver_namespace != process_namespace():
            return
        if not status.final and status.submission == self.submission and process_state(pid, start):
            signal_cancel(pid)


CANCEL = signal.SIGUSR1
"""Signal to a driver process that the end of its run was requested. The request is in the store, soon or already."""


def signal_cancel(pid: int) -> None:
    """Sends `CANCEL` to a driver process, but not while it is just starting and has no handler yet."""
    if CANCEL in (caught_signals(pid) or ()):
        with contextlib.suppress(OSError):
            os.kill(pid, CANCEL)


def owns(run: RunDirectory, submission: int, nonce: str) -> bool:
    """Returns True if a run directory still belongs to this submission, so that its driver may write there.

    Restores the submission's ``job.json`` if a delayed submitter has overwritten it with an older one.

    Args:
        run: The run directory.
        submission: Number of the driver's submission.
        nonce: `Job.nonce` of the driver's submission.

    Raises:
        OSError: the store cannot be read (or an error of its fsspec driver).
    """
    try:
        current = run.job()
        if current.submission > submission:
            return False
        if current.submission == submission and current.nonce in ("", nonce):
            return True
        # A removed directory has lost this submission's job, or has the job of another run.
        own = run.job_of(submission)
        if nonce and not (own and own.nonce == nonce):
            return False
    except RunNotFoundError:
        return False
    with contextlib.suppress(FileNotFoundError):
        run.restore(submission)
        return True
    return False


T = TypeVar("T")

STORE_PATIENCE = bounds.scaled(15.0)  # For which a follower retries to read a store that fails
DRIVER_LOG_TAIL = 15  # Last lines of a dead driver's log that the error shows


class OwnDriver(Protocol):
    """Interface of a driver that this process started as a child process or a thread."""

    @property
    def pid(self) -> int:
        """Returns the id of the driver's process."""

    def poll(self) -> int | None:
        """Returns None while the driver lives."""

    def await_end(self, timeout: float) -> None:
        """Waits until the driver has ended, at most ``timeout`` seconds."""

    def cancel(self) -> None:
        """Makes the driver end the run on request, without the store."""

    def last_output(self) -> bytes:
        """Returns the end of what the driver's process has printed; empty for a thread."""


class Observer:
    """Observes one run for one process."""

    def __init__(self, run: RunDirectory, driver: OwnDriver | None, submission: int) -> None:
        """Makes an observer; `status` accesses the store.

        Args:
            run: The run directory.
            driver: The run's driver, if this process has started it.
            submission: Number of the submission that ``driver`` drives.
        """
        self._run = run
        self._driver = driver
        self._submission = submission
        self._pid = os.getpid()
        self._heartbeat = HeartbeatWatch()
        self.current = CurrentStatus(run)

    def cancel(self, receiver: Mapping[str, Any] | None, reason: str) -> None:
        """Requests the end of the run: from a driver that this process started, then in the store."""
        if self._driver and os.getpid() == self._pid:
            self._driver.cancel()
        self.current.cancel(receiver, reason)

    def status(self, timeout: float) -> RunStatus:
        """Returns the current status, from a store that may fail for ``timeout`` seconds.

        A run whose driver died is reported as failed, or as succeeded if its success was already recorded.
        """
        return self.judged(self.patiently(self.current.read, timeout), timeout)

    def judged(self, status: RunStatus, timeout: float) -> RunStatus:
        """Returns a status that was just read; the status of a run whose driver died as `status` reports it."""
        if status.final or not self._driver_died(status):
            return status
        # The driver may have written in the meantime, or this machine may have slept, so the status is read again.
        before, status = status, self.patiently(self.current.read, timeout)
        if status.final or status.heartbeat != before.heartbeat:
            return status
        status = self.patiently(lambda: self.current.outcome(before), timeout)
        if status.final:
            return status
        if status.certain:
            return replace(status, state="succeeded", ended=status.heartbeat)
        who = f"process {status.driver_pid} on {status.driver_host}" if status.driver_pid else "not started"
        end = "died without ending the run"
        if _process_state(status) in STOPPED:
            silence = f"it sent no heartbeat for {dead_after(status):.0f} s, and counts as dead"
            end = f"is stopped: {silence}. It has not ended the run"
        text = f"the driver of run {self._run.directory.rsplit('/', 1)[-1]} ({who}) {end}, which was {status.shown}"
        error = EngineError("\n".join([text, *self._driver_log_tail()]), code="RZ-2004")
        return replace(status, state="failed", error=error.to_json(), ended=status.heartbeat)

    def _driver_log_tail(self) -> list[str]:
        with contextlib.suppress(OSError):
            if self._run.is_remote:
                output = self._driver.last_output() if self._driver else b""
            else:
                output = store.read_bytes(self._run.path("driver.log"))
            return [f"  {line}" for line in output.decode("utf-8", "replace").splitlines()[-DRIVER_LOG_TAIL:]]
        return []

    @property
    def store_timeout(self) -> float:
        """Seconds for which a store may fail: longer for the owner of a living driver, whose error ends the run."""
        owns = self._driver is not None and self._driver.poll() is None
        return STORE_OUTAGE() if owns else STORE_PATIENCE()

    def patiently(self, read: Callable[[], T], timeout: float | None = None) -> T:
        """Reads the store, and retries for ``timeout`` seconds (None: `store_timeout`), since it may fail for a while.

        Raises:
            RunNotFoundError: the directory holds no run.
            Exception: the last error of the store.
        """

        def gives_up(error: Exception) -> bool:
            self._heartbeat.note_blindness()
            return isinstance(error, RunNotFoundError)

        return store.patiently(
            read, self.store_timeout if timeout is None else timeout, bounds.STORE_RETRY_INTERVAL(), gives_up
        )

    def driver_lives(self, status: RunStatus) -> bool | None:
        """Returns whether the driver lives; None if this process cannot query it and only the heartbeat decides.

        A driver that this process started is a child process or a thread, whose end is known. Its training therefore
        continues even if the store rejects its heartbeats for minutes.
        """
        if self._driver is not None and status.submission == self._submission and os.getpid() == self._pid:
            # The host is compared by its name, since followers do this often, and the process namespace costs more.
            ours = (socket.gethostname(), self._driver.pid)
            if status.driver_pid is not None and (status.driver_host, status.driver_pid) != ours:
                # It has delegated the run to a driver in its stage.
                return process_lives(status)
            if self._driver.poll() is not None:
                return False
            # The agents of a driver process that is stopped for long end themselves. A driver thread stops only
            # together with this code.
            is_stopped = self._driver.pid != os.getpid() and process_state(self._driver.pid, None) in STOPPED
            return None if is_stopped else True
        if status.driver_pid is None and (process := self._starting(status)):
            status = replace(status, **{f"driver_{fact}": process[fact] for fact in ("pid", "start", "namespace")})
        return process_lives(status)

    def _starting(self, status: RunStatus) -> dict[str, Any] | None:
        """Returns the process that is the driver or starts it, before the driver's first status; None if unknown."""
        if process := self._run.starting(status.submission):
            return process
        # The owner says nothing about a driver that a cluster starts, which may never start.
        if not status.patience:
            # If the store fails now, the heartbeat decides.
            with contextlib.suppress(Exception):
                job = self._run.find_job()
                return job.owner if job and job.submission == status.submission else None
        return None

    def _driver_died(self, status: RunStatus) -> bool:
        is_silent = self._heartbeat.is_silent(status)
        lives = self.driver_lives(status)
        # A slow disk may delay the heartbeat of a living driver, so the process decides if it can be queried.
        return is_silent if lives is None else not lives

    def store_timeout_until(self, deadline: float | None) -> float:
        """Returns `store_timeout`, or the time until a deadline if that is shorter, but at least `STORE_PATIENCE`."""
        left = math.inf if deadline is None else max(0.0, deadline - time.monotonic())
        return min(self.store_timeout, max(STORE_PATIENCE(), left))


class HeartbeatWatch:
    """Watches a driver's heartbeat for one reader, with a monotonic clock, which stops while the machine sleeps."""

    def __init__(self) -> None:
        self._last = self._last_seen = self._blind_until = 0.0

    def note_blindness(self) -> None:
        """Records that the status could not be read until now, so that this time does not count against the driver."""
        self._blind_until = time.monotonic()

    def is_silent(self, status: RunStatus) -> bool:
        """Returns True if the heartbeat has not changed for so long that its driver counts as dead.

        The wall clock advances while a laptop or a VM sleeps, and a driver there does not. It is therefore used here
        only for the first status, and only if the driver's process is not visible.
        """
        is_first = not self._last_seen
        if status.heartbeat != self._last:
            self._last, self._last_seen = status.heartbeat, time.monotonic()
        unchanged = time.monotonic() - max(self._last_seen, self._blind_until)
        age = time.time() - status.heartbeat if is_first and not _process_state(status) else 0.0
        bound = dead_after(status)
        # The clocks of the two hosts may differ.
        return unchanged > bound or age > bound + CLOCK_SKEW


def process_lives(status: RunStatus) -> bool | None:
    """Returns whether the driver lives; None if its process cannot be queried and only the heartbeat decides.

    A process that exists is alive even if the store rejects its heartbeats. The driver may be a thread of a process
    that outlives it, such as a notebook, so the kernel is queried for the thread.
    """
    if status.driver_pid is None or status.driver_namespace != process_namespace():
        return None
    state = _process_state(status)
    if state is None:
        return False
    if status.driver_thread is None:
        # A stopped driver is left to its heartbeat. When that is too old, its agents have ended as well.
        return None if state in STOPPED else True
    lives = thread_lives(status.driver_pid, status.driver_thread)
    is_stale = time.time() - status.heartbeat > DRIVER_STALE_AFTER()
    return None if lives is None and is_stale else lives is not False


def _process_state(status: RunStatus) -> str | None:
    """Returns the state of the driver's process; None if it has exited or is on another machine."""
    if status.driver_pid is None or status.driver_namespace != process_namespace():
        return None
    return process_state(status.driver_pid, status.driver_start)


_MISSED = 3
"""Number of heartbeats that a driver may miss."""


def dead_after(status: RunStatus) -> float:
    """Returns the seconds without a heartbeat after which the driver that wrote a status counts as dead.

    A driver that a cluster has not started yet has `RunStatus.patience` seconds until its first heartbeat.
    """
    return max(DRIVER_DEAD_AFTER(), _MISSED * status.interval, status.patience)
