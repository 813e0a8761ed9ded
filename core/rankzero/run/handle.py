"""`RunHandle`: a run, from any process that knows its directory."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar, cast

from rankzero import store
from rankzero.bounds import DRIVER_DEAD_AFTER, DRIVER_STALE_AFTER
from rankzero.errors import EngineError, ResultError, RunNotFoundError, error_from_json
from rankzero.host.processes import STOPPED, process_namespace, process_state
from rankzero.run import delivery as deliveries
from rankzero.run import growing
from rankzero.run.checkpoints import Manifest, list_committed
from rankzero.run.delivery import Delivery
from rankzero.run.directory import EVENTS, RunDirectory, RunStatus, log_name
from rankzero.run.growing import Position
from rankzero.run.liveness import driver_is_dead
from rankzero.values.ref import ResultRef

R = TypeVar("R")
T = TypeVar("T")

FOLLOW_INTERVAL = 0.05
"""Seconds between two looks at a run directory on a local disk."""

FOLLOW_INTERVAL_REMOTE = 1.0
"""Seconds between two looks at a run directory on an object store."""

THOROUGH_INTERVAL = 2.0
"""Seconds between two looks at every log, for a file server that may not tell at once which have grown."""

STORE_PATIENCE = DRIVER_DEAD_AFTER
"""Seconds for which a follower tries again to read a store that fails."""

LEASE_INTERVAL = 10.0
"""Longest time in seconds between two renewals of a followed run's lease."""

DRIVER_LOG_TAIL = 15
"""Lines of a dead driver's log that its error shows."""


class OwnDriver(Protocol):
    """A driver that this process started: a child process, or a thread."""

    def poll(self) -> int | None:
        """None while it lives."""

    def await_end(self, timeout: float) -> None:
        """Returns when it has ended, or after so many seconds."""


class RunHandle(Generic[R]):
    """A run, from any process that knows its directory.

    Attributes:
        directory: Absolute path or URL of the run directory.
        id: The run's name.
    """

    def __init__(self, directory: str, driver: OwnDriver | None = None) -> None:
        self._run = RunDirectory(directory)
        self._driver = driver
        self._submission = self._bound if driver else -1
        self._delivered = -1
        self.directory = self._run.directory
        self.id = self.directory.rsplit("/", 1)[-1]
        self._tick = threading.Event()
        self._heartbeat = self._heartbeat_seen = 0.0
        self._lease_interval: float | None = None
        self._lease_renewed = 0.0
        self._lease_bound: float | None = None

    @staticmethod
    def attach(directory: str | os.PathLike[str]) -> RunHandle[Any]:
        """The handle of a run that somebody started.

        Raises:
            RunNotFoundError: no run lives there.
        """
        handle: RunHandle[Any] = RunHandle(os.fspath(directory))
        # Raises where there is none, too.
        handle._bound  # noqa: B018
        return handle

    @property
    def labels(self) -> dict[str, str]:
        """The last submission's `Launcher.labels`."""
        return self._run.job().labels

    @property
    def world_size(self) -> int:
        """Number of ranks of the last submission."""
        return self._run.job().num_processes

    @property
    def identity(self) -> str:
        """What makes the last submission's training the same as another one; see `Launcher.identity`."""
        return self._run.job().identity

    @property
    def submission(self) -> int:
        """How often this run id was submitted before."""
        return self._run.job().submission

    @property
    def created(self) -> float:
        """Unix time of the last submission."""
        return self._run.job().created

    def __repr__(self) -> str:
        return f"RunHandle({self.directory!r})"

    def status(self) -> RunStatus:
        """The run's state now. A run whose driver died is reported as failed."""
        status = self._patiently(self._run.status)
        if status.final or not self._driver_died(status):
            return status
        # It may have written its final status between the two looks.
        status = self._patiently(self._run.status)
        if status.final:
            return status
        who = f"process {status.driver_pid} on {status.driver_host}" if status.driver_pid else "not started"
        text = f"the driver of run {self.id} ({who}) died without ending the run"
        error = EngineError("\n".join([text, *self._driver_log_tail()]))
        return replace(status, state="failed", error=error.to_json())

    def _driver_log_tail(self) -> list[str]:
        with contextlib.suppress(OSError):
            text = store.read_bytes(self._run.path("driver.log")).decode("utf-8", "replace")
            return [f"  {line}" for line in text.splitlines()[-DRIVER_LOG_TAIL:]]
        return []

    def _patiently(self, read: Callable[[], T]) -> T:
        """Reads the store, again while it fails for a moment: a follower's trouble must not end a training.

        Raises:
            RunNotFoundError: there is no run.
            Exception: the store's, after `STORE_PATIENCE` seconds.
        """
        return store.patiently(
            read, STORE_PATIENCE, FOLLOW_INTERVAL_REMOTE, lambda error: isinstance(error, RunNotFoundError)
        )

    def driver_lives(self, status: RunStatus) -> bool | None:
        """True or False if this process can ask the driver; None where only the heartbeat can tell."""
        if self._driver is not None and status.submission == self._submission:
            if self._driver.poll() is not None:
                return False
            if status.driver_pid is None:
                return True
        if time.time() - status.heartbeat > DRIVER_STALE_AFTER:
            # Its process may live on without it: a notebook in which the driver was a thread.
            return None
        if status.driver_pid is not None and status.driver_namespace == process_namespace():
            state = process_state(status.driver_pid, status.driver_start)
            # A stopped driver shows no heartbeat and has lost its agents by the time that counts.
            return None if state in STOPPED else state is not None
        return None

    def _driver_died(self, status: RunStatus) -> bool:
        if status.heartbeat != self._heartbeat:
            self._heartbeat, self._heartbeat_seen = status.heartbeat, time.monotonic()
        unchanged = time.monotonic() - self._heartbeat_seen
        lives = self.driver_lives(status)
        if lives is not None:
            # A slow disk may delay the heartbeat of a driver that lives.
            return not lives
        return driver_is_dead(status.heartbeat, time.time(), unchanged)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end of the run, however it ends.

        Args:
            timeout: Seconds to wait; None waits as long as the run lasts.

        Returns:
            True if the run has ended, False if the time is up.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.status().final:
            if deadline is not None and time.monotonic() >= deadline:
                return False
            self._pause()
        return True

    def _pause(self) -> None:
        self._renew_lease()
        interval = FOLLOW_INTERVAL_REMOTE if self._run.is_remote else FOLLOW_INTERVAL
        if self._driver is not None and self._driver.poll() is None:
            self._driver.await_end(interval)
        else:
            # An Event, not a sleep: exceptions of signal handlers get out at once.
            self._tick.wait(interval)

    def renew_lease(self) -> None:
        """Reports to the driver that somebody follows the run; what waits for it or reads its lines does so by itself.

        Raises:
            OSError: the store cannot be written.
        """
        self._run.renew_lease(self._lease_bound)

    def hold(self, bound: float) -> None:
        """From now on the run ends if this handle does not follow it for so many seconds; nobody comes after it.

        For the last that attaches to a run with an ``orphan_timeout``, which would else wait that long for the next.

        Raises:
            OSError: the store cannot be written.
        """
        self._lease_bound, self._lease_interval = bound, min(LEASE_INTERVAL, bound / 4)
        self.renew_lease()

    def _renew_lease(self) -> None:
        """Reports to the driver of a run with an ``orphan_timeout`` that somebody follows it."""
        if self._lease_interval is None:
            bound = self._run.job().orphan_timeout
            self._lease_interval = 0.0 if bound is None else min(LEASE_INTERVAL, bound / 4)
        if self._lease_interval and time.monotonic() - self._lease_renewed > self._lease_interval:
            self._lease_renewed = time.monotonic()
            # A lease that cannot be renewed must not end the follower.
            with contextlib.suppress(Exception):
                self._run.renew_lease(self._lease_bound)

    def result_ref(self, timeout: float | None = None) -> ResultRef:
        """Waits and returns the handle of rank 0's value.

        Raises:
            TimeoutError: the run has not ended after ``timeout`` seconds.
            RankZeroError: the run did not succeed; the type says why.
        """
        return ResultRef.from_json(cast("dict[str, Any]", self._outcome(timeout).result))

    def result(self, timeout: float | None = None) -> R:
        """Waits and returns rank 0's value. Raises like `result_ref`."""
        status = self._outcome(timeout)
        if status.value:
            return cast(R, status.value[0])
        return cast(R, ResultRef.from_json(cast("dict[str, Any]", status.result)).load())

    def _outcome(self, timeout: float | None) -> RunStatus:
        if not self.wait(timeout):
            raise TimeoutError(f"run {self.id} has not ended after {timeout} s; it goes on")
        status = self.status()
        if status.error is not None:
            raise error_from_json(status.error)
        if status.result is None:
            raise ResultError(f"run {self.id} ended as {status.state} without a result")
        self._delivered = status.submission
        return status

    def delivery(self) -> Delivery:
        """To whom the last submission's result was offered, and whether they have acknowledged it."""
        return deliveries.read(self.directory, self._ended_submission())

    def offer(self, receiver: Mapping[str, Any]) -> None:
        """Notes to whom the result goes, before it goes there.

        Args:
            receiver: JSON values by name, by which an orchestrator can be asked later whether it got the result.

        Raises:
            OSError: the store cannot be written.
        """
        deliveries.write(self.directory, Delivery(self._ended_submission(), dict(receiver)))

    def acknowledge(self) -> None:
        """Notes that the receiver has the result for good, so that submitting this run id again trains from scratch.

        Until then another submission of the same training under this id gets this result, and trains nothing.

        Raises:
            OSError: the store cannot be written.
        """
        deliveries.write(self.directory, replace(self.delivery(), acknowledged=True))

    def _ended_submission(self) -> int:
        return self._delivered if self._delivered >= 0 else self._run.job().submission

    def checkpoints(self) -> list[Manifest]:
        """The committed checkpoints, oldest first."""
        return list_committed(self._run, self._run.job().fresh_since)

    def cancel(self) -> None:
        """Asks the driver to end the run; no error if it has ended, or was asked before. `wait` for the end.

        The request belongs to the submission that this handle was made for: it does not reach a later one.
        """
        status = self._run.status()
        if not status.final and status.submission <= self._bound:
            self._run.request_cancel(self._bound)
            if self._run.is_remote:
                self._wake_driver(status)

    @functools.cached_property
    def _bound(self) -> int:
        """The submission that this handle was made for."""
        return self._run.job().submission

    def _wake_driver(self, status: RunStatus) -> None:
        """Notifies a submitted run's driver at once, if it is of this machine: it asks an object store now and then."""
        pid, job = status.driver_pid, self._run.job()
        is_here = status.driver_namespace == process_namespace() and status.submission == self._bound == job.submission
        if pid and job.owner is None and is_here and process_state(pid, status.driver_start):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)

    def logs(self, rank: int | None = None, follow: bool = False) -> Iterator[str]:
        """Lines that the ranks wrote, in every attempt.

        Args:
            rank: One rank's lines as they were; None gives all ranks' with a ``[rank]`` prefix.
            follow: Go on until the run ends. Lines of a rank that prints little come about twice a second.
        """
        ranks = range(self._run.job().num_processes) if rank is None else [rank]
        yield from self.lines(dict.fromkeys(ranks, Position()), follow, prefix=rank is None)

    def log_ends(self) -> dict[int, Position]:
        """Where every rank's lines end now: `lines` from there on gives what is written later."""
        return {rank: growing.end_of(self._run.path(log_name(rank))) for rank in range(self._run.job().num_processes)}

    def log_starts(self) -> dict[int, Position]:
        """Where every rank's lines of the last submission begin."""
        job = self._run.job()
        return {rank: Position(*job.log_starts.get(str(rank), ())) for rank in range(job.num_processes)}

    def lines(self, positions: dict[int, Position], follow: bool, *, prefix: bool) -> Iterator[str]:
        """The lines of some ranks from given positions on. What `logs` stands on."""
        thorough_at = 0.0
        for is_last in self._looks(follow):
            if is_last or time.monotonic() >= thorough_at:
                unread, thorough_at = set(positions), time.monotonic() + THOROUGH_INTERVAL
            else:
                unread = self._patiently(functools.partial(self._grown_logs, positions))
            while unread:
                self._renew_lease()
                for number in sorted(unread):
                    read = functools.partial(growing.read_lines, self._run.path(log_name(number)), positions[number])
                    lines, positions[number] = self._patiently(read)
                    yield from (f"[{number}] {line}" for line in lines) if prefix else lines
                    if not lines:
                        unread.discard(number)

    def _grown_logs(self, positions: dict[int, Position]) -> set[int]:
        """The ranks whose logs may be longer than what was read; on a URL all."""
        if self._run.is_remote:
            return set(positions)
        return {
            rank for rank, position in positions.items() if growing.has_grown(self._run.path(log_name(rank)), position)
        }

    def events(self, follow: bool = False) -> Iterator[dict[str, Any]]:
        """State changes, metrics and failures in the order in which the driver heard of them.

        Each is a dict with ``type`` (``"state"``, ``"metric"``, ``"checkpoint"``, ``"failure"``, ``"restart"``)
        and ``time``.
        """
        position = Position()
        for _ in self._looks(follow):
            while True:
                read = functools.partial(growing.read_lines, self._run.path(EVENTS), position)
                lines, position = self._patiently(read)
                for line in lines:
                    # A line that a full disk tore is no JSON.
                    with contextlib.suppress(ValueError):
                        yield json.loads(line)
                if not lines:
                    break

    def _looks(self, follow: bool) -> Iterator[bool]:
        """One round for every look at a growing file; True for the last, which comes after the run's end."""
        while follow and not self.status().final:
            yield False
            self._pause()
        yield True

    def metrics(self) -> list[dict[str, Any]]:
        """What the ranks reported: rows with ``rank``, ``time`` and the metrics' names."""
        return [
            {"rank": event["rank"], "time": event["time"], **event["metrics"]}
            for event in self.events()
            if event["type"] == "metric"
        ]
