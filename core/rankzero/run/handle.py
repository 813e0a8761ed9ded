"""`RunHandle`: a run, from any process that knows its directory."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

from rankzero import store
from rankzero.errors import (
    RankZeroError,
    ResultError,
    RunCancelledError,
    RunNotFoundError,
    error_from_json,
)
from rankzero.host.processes import process_namespace, process_state
from rankzero.run import delivery as deliveries
from rankzero.run import pieces
from rankzero.run.checkpoints import Manifest, list_committed
from rankzero.run.current import CurrentStatus
from rankzero.run.delivery import Delivery
from rankzero.run.directory import EVENTS, LINES, RunDirectory, RunStatus, compare_job
from rankzero.run.growing import Position
from rankzero.run.identity import Asked, Comparison, Identity
from rankzero.run.lines import LineReader
from rankzero.run.observer import Observer, OwnDriver
from rankzero.run.pace import LONGEST_PACE, SHORTEST_PACE
from rankzero.run.renewal import Renewal
from rankzero.run.reports import OfTraining
from rankzero.values.ref import ResultRef

R = TypeVar("R")
T = TypeVar("T")

FOLLOW_INTERVAL = 0.05
"""Seconds between two looks at a run directory on a local disk."""

THOROUGH_INTERVAL = 2.0
"""Seconds between two looks at every log, for a file server that may not tell at once which have grown."""


class RunHandle(Generic[R]):
    """A run, from any process that knows its directory.

    Attributes:
        directory: Absolute path or URL of the run directory.
        id: The run's name.
    """

    def __init__(self, directory: str, driver: OwnDriver | None = None, *, follows: bool = True) -> None:
        """Reads nothing, unless there is a driver.

        Args:
            directory: The run directory.
            driver: The run's driver, if this process has started it.
            follows: False for who is no reason for the run to go on: the run's own driver, which reads it, too.
        """
        self._run = RunDirectory(directory)
        self._driver = driver
        self._current = CurrentStatus(self._run)
        self._observer = Observer(self._run, driver, self._bound if driver else -1, self._current)
        self._delivered = -1
        self.directory = self._run.directory
        self.id = self.directory.rsplit("/", 1)[-1]
        self._tick = threading.Event()
        self._interval = SHORTEST_PACE
        self._is_ending = False
        self._lines = LineReader(self._run, self._read_as_follower)
        self._lease = Renewal(self._run) if follows else None

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
    def params(self) -> dict[str, Any]:
        """The last submission's arguments by name, as short plain values, for people and trackers.

        What is no number, text or truth value is its type alone; a value whose name looks secret is ``***``. Of a
        script's command line ``--name value`` is one.
        """
        return self._run.job().params

    @property
    def world_size(self) -> int:
        """Number of ranks of the last submission; of an elastic one those of its last attempt, or at most."""
        job = self._run.job()
        return (job.min_processes and self._observer.patiently(self._run.status).world_size) or job.num_processes

    @property
    def identity(self) -> str:
        """What makes the last submission's training the same as another one; see `Launcher.identity`."""
        return self._run.job().identity

    def compare(self, identity: Identity, generation: str = "") -> Comparison:
        """Compares the last submission's training with another one.

        Args:
            identity: Of the other training; see `Launcher.identity`.
            generation: The chain of tries that an orchestrator starts by itself, if a try of it asks.
        """
        return compare_job(self._run, self._run.job(), Asked(identity, generation))

    @property
    def code_version(self) -> str | None:
        """The last submission's `Launcher.code_version`."""
        return self._run.job().code_version

    @property
    def submission(self) -> int:
        """How often this run id was submitted before."""
        return self._run.job().submission

    @property
    def created(self) -> float:
        """Unix time of the last submission."""
        return self._run.job().created

    @property
    def fresh_since(self) -> int:
        """The first attempt of this training: another one may have had the run id before."""
        return self._run.job().fresh_since

    def __repr__(self) -> str:
        return f"RunHandle({self.directory!r})"

    def _repr_html_(self) -> str | None:
        """The run in a notebook: its state, progress and curves."""
        from rankzero.run.notebook import Card

        with contextlib.suppress(RankZeroError, OSError):
            return Card(self).html()
        return None

    def status(self) -> RunStatus:
        """The run's state now.

        A run whose driver died is reported as failed, or as succeeded if that was certain before.
        """
        return self._seen(self._observer.patience)

    def _seen(self, patience: float) -> RunStatus:
        status = self._observer.status(patience)
        self._interval = status.interval
        return status

    def driver_lives(self, status: RunStatus) -> bool | None:
        """True or False if this process can ask the driver; None where only the heartbeat can tell."""
        return self._observer.driver_lives(status)

    def _read_as_follower(self, read: Callable[[], T]) -> T:
        """Much to read takes its time."""
        if self._lease:
            self._lease.renew_if_due()
        return self._observer.patiently(read)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end of the run, however it ends.

        Args:
            timeout: Seconds to wait; None waits as long as the run lasts.

        Returns:
            True if the run has ended, False if the time is up.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._seen(self._observer.patience_until(deadline)).final:
            if deadline is not None and time.monotonic() >= deadline:
                return False
            self.pause(math.inf if deadline is None else deadline - time.monotonic())
        return True

    def await_driver(self, timeout: float) -> None:
        """Waits until the driver of a run that has ended is done with the rest, its trackers and its report.

        Args:
            timeout: Seconds to wait at most. A driver that another process has started is not waited for.
        """
        if self._driver is not None:
            self._driver.await_end(timeout)

    @property
    def pace(self) -> float:
        """Seconds until there may be something new to see on an object store, as its driver says; 0 on a disk."""
        if not self._run.is_remote:
            return 0.0
        return min(self._interval, SHORTEST_PACE if self._is_ending else LONGEST_PACE)

    def pause(self, bound: float = math.inf) -> None:
        """Waits until it is worth another look at the run, at most so many seconds, and not beyond its end."""
        if self._lease:
            self._lease.renew_if_due()
        interval = max(0.0, min(max(self.pace, FOLLOW_INTERVAL), bound))
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
        if self._lease:
            self._lease.renew()

    def hold(self, bound: float) -> None:
        """From now on the run ends if this handle does not follow it for so many seconds; nobody comes after it.

        For the last that attaches to a run with an ``orphan_timeout``, which would else wait that long for the next.

        Raises:
            OSError: the store cannot be written.
        """
        if self._lease:
            self._lease.hold(bound)

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
        # The value may be a pickle, whose checksum is in this directory, too. Root reads what it is asked to.
        is_root = getattr(os, "geteuid", int)() == 0
        if not is_root and (why := store.why_untrusted(self.directory)):
            raise ResultError(f"the run directory {self.directory} {why}")
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
        status = self._current.read()
        if not status.final and status.submission <= self._bound:
            self._run.request_cancel(self._bound)
            self._is_ending = True
            if status.driver_pid is None and self._is_for_a_cluster() and self._run.claim_driver(self._bound):
                # The driver, when it comes, finds that there is one, and ends.
                error = RunCancelledError("the run was cancelled before its driver started", requested=True)
                ended = replace(status, state="cancelled", error=error.to_json(), ended=time.time())
                self._run.write_status(ended)
            elif self._run.is_remote:
                self._wake_driver(status)

    @functools.cached_property
    def _bound(self) -> int:
        """The submission that this handle was made for: of one that is being written there is a status first."""
        job = self._run.job()
        with contextlib.suppress(RunNotFoundError):
            status = self._current.read()
            if status.submission > job.submission:
                self._current.bind(status.submission, status.nonce)
                return status.submission
        self._current.bind(job.submission, job.nonce)
        return job.submission

    def _is_for_a_cluster(self) -> bool:
        """True if a cluster is to start the driver of this submission, perhaps much later."""
        job = self._run.job()
        return job.submission == self._bound and "deploy_mode" in job.engine

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

    def log_ends(self, ranks: Iterable[int] | None = None, status: RunStatus | None = None) -> dict[int, Position]:
        """Where ranks' lines end now: `lines` from there on gives what is written later.

        Args:
            ranks: Which ranks; None for all.
            status: The run's, just read. It saves an object store a request.
        """
        ranks = range(self._run.job().num_processes) if ranks is None else ranks
        return self._lines.ends(ranks, status or self._observer.patiently(self._run.status))

    def log_starts(self) -> dict[int, Position]:
        """Where every rank's lines of the last submission begin."""
        job = self._run.job()
        return {rank: Position(*job.log_starts.get(str(rank), ())) for rank in range(job.num_processes)}

    def begin_of_last(self, start: Position, end: Position, most: int) -> tuple[Position, int]:
        """Returns where the last ``most`` bytes of lines between two positions begin, and how many come before."""
        location = self._run.path(LINES)
        return self._read_as_follower(lambda: pieces.begin_of_last(location, start, end, most))

    def lines(
        self,
        positions: dict[int, Position],
        follow: bool,
        *,
        prefix: bool,
        status: RunStatus | None = None,
        ends: Mapping[int, Position] | None = None,
    ) -> Iterator[str]:
        """The lines of some ranks from given positions on, which move on. What `logs` stands on.

        Args:
            positions: By rank.
            follow: Go on until the run ends.
            prefix: Lines begin with ``[rank]``.
            status: For one look: the run's, just read. It saves an object store requests.
            ends: For one look, on a disk: by rank, where it stops.
        """
        if not follow:
            yield from self._lines.of_ranks(positions, _running(status), prefix=prefix, ends=ends)
            return
        thorough_at = 0.0
        for found in self._looks():
            thorough = found.final or time.monotonic() >= thorough_at
            if thorough:
                thorough_at = time.monotonic() + THOROUGH_INTERVAL
            yield from self._lines.of_ranks(positions, _running(found), prefix=prefix, thorough=thorough)

    def events(self, follow: bool = False) -> Iterator[dict[str, Any]]:
        """State changes, metrics and failures of this training, in the order in which the driver received them.

        Events of another training that had the run id before are left out: they end where a submission started from
        scratch. Each is a dict with ``time`` and ``type`` (``"state"``, ``"metric"``, ``"checkpoint"``, ``"failure"``,
        ``"restart"``, ``"engine"``, ``"waiting"``, ``"world"``, ``"left-out"``). Those of type ``"state"`` have
        ``submission`` and ``attempt``.
        """
        position, is_ours = Position(), OfTraining(self.fresh_since)
        for status in self._looks() if follow else [None]:
            while True:
                before = position
                events, position = self.read_events(before, status)
                yield from filter(is_ours, events)
                if position == before:
                    break

    def read_events(self, position: Position, status: RunStatus | None = None) -> tuple[list[dict[str, Any]], Position]:
        """Some events from a position on, and the new position: the same at their end.

        Args:
            position: Where to begin; ``Position()`` is the beginning.
            status: The run's, just read. It saves an object store requests.
        """
        lines, position = self._lines.of_file(EVENTS, position, _running(status))
        events = []
        for line in lines:
            # A line that a full disk tore is no JSON.
            with contextlib.suppress(ValueError):
                events.append(json.loads(line))
        return events, position

    def tails(self, ranks: Iterable[int], size: int) -> dict[int, tuple[list[str], bool]]:
        """The last lines of some ranks in the last submission.

        Args:
            ranks: Which.
            size: About so many bytes of each. On an object store, where all ranks share one stream, these are looked
                for in its last pieces.

        Returns:
            By rank: the lines, and whether others come before.
        """
        starts, status = self.log_starts(), self._observer.patiently(self._run.status)
        return self._lines.tails({rank: starts[rank] for rank in ranks}, size, status, _running(status))

    def _looks(self) -> Iterator[RunStatus]:
        """The status for every look at what grows; the last comes after the run's end."""
        while not (status := self.status()).final:
            yield status
            self.pause()
        yield status

    def metrics(self) -> list[dict[str, Any]]:
        """What the ranks of this training reported: rows with ``rank``, ``time`` and the metrics' names."""
        return [
            {"rank": event["rank"], "time": event["time"], **event["metrics"]}
            for event in self.events()
            if event["type"] == "metric"
        ]


def _running(status: RunStatus | None) -> RunStatus | None:
    """None for a run that has ended: of what its driver wrote last before it died, its status knows nothing."""
    return None if status is None or status.final else status
