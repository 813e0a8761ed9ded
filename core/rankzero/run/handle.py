"""`RunHandle` gives access to a run from any process that can read its directory."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

from rankzero import store
from rankzero.errors import ResultError, error_from_json, located
from rankzero.job import Job
from rankzero.run.checkpoints import Manifest, list_committed
from rankzero.run.directory import EVENTS, LINES, Delivery, RunDirectory, Submission, bound_of
from rankzero.run.lines import Line, Stream, events_of, parsed
from rankzero.run.observer import Observer, OwnDriver
from rankzero.run.reports import as_row
from rankzero.run.status import LONGEST_PACE, SHORTEST_PACE, RunStatus
from rankzero.values.ref import ResultRef

FOLLOW_INTERVAL = 0.1  # Seconds between two polls of a run directory on a local disk

R = TypeVar("R")
T = TypeVar("T")


class RunHandle(Observer, Generic[R]):
    """A handle of one submission of a run, for any process that can read its directory.

    If the run id is submitted again, everything stays that of the handle's own submission.

    Attributes:
        directory: Absolute path or URL of the run directory.
        id: The run's name.
        own: The files of the submission.
        job: The job of the submission: what to run, where and how.
        attached: False if this process has started the run, True if another process or another try of a step has.
    """

    attached = True

    def __init__(
        self, directory: str, driver: OwnDriver | None = None, *, job: Job | None = None, follows: bool = True
    ) -> None:
        """Makes a handle of ``job``, whose driver this process may have started; without a job, of the last submission.

        One that does not follow does not keep the run alive.
        """
        run = RunDirectory(directory)
        self.directory = run.directory
        self.id = self.directory.rsplit("/", 1)[-1]
        self.job = job or run.job()
        super().__init__(Submission(run, self.job), driver)
        self._follows = follows
        self._lease = self.job.orphan_timeout
        self._renewed = 0.0

    @staticmethod
    def attach(directory: str | os.PathLike[str], *, follows: bool = True) -> RunHandle[Any]:
        """Returns the handle of an existing run.

        Args:
            directory: The run directory.
            follows: False for a reader that does not keep the run alive.

        Raises:
            RunNotFoundError: the directory holds no run.
        """
        with located(store.normalize(directory)):
            return RunHandle(os.fspath(directory), follows=follows)

    @property
    def params(self) -> dict[str, Any]:
        """Returns the arguments by name, as short plain values, for people and trackers; of a program, ``args``."""
        return dict(self.job.params)

    @property
    def world_size(self) -> int:
        """Returns the number of ranks; of an elastic run that of its last attempt, or the most."""
        job = self.job
        return (job.min_processes and self._patiently(self.own.status).world_size) or job.num_processes

    @property
    def training(self) -> str:
        """Returns the name of the training, which its first submission has given it, and which no other one has."""
        return self.job.earlier[0] if self.job.earlier else self.own.name

    def __repr__(self) -> str:
        return f"RunHandle({self.directory!r})"

    # -- the end of the run ----------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the run has ended, with any outcome.

        Args:
            timeout: Seconds to wait; None waits without a limit.

        Returns:
            True if the run has ended, False if the timeout has passed.
        """
        return any(status.final for status in self._polls(timeout))

    def _polls(self, timeout: float | None = None) -> Iterator[RunStatus]:
        """Yields a status for every poll of the run; the last one is read after the end of the run, or the timeout."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            yield (status := self.judged(self._patiently(self._read, left), left))
            if status.final or (left := deadline - time.monotonic()) <= 0:
                return
            self.pause(left)

    def await_driver(self, timeout: float) -> None:
        """Waits until the driver of an ended run has also finished its trackers and report, if it is this process's.

        Args:
            timeout: Seconds to wait at most.
        """
        if self._driver is not None:
            self._driver.await_end(timeout)

    @property
    def pace(self) -> float:
        """Returns the seconds after which the driver writes to an object store again; 0 on a disk."""
        if not self.own.is_remote:
            return 0.0
        interval = self._last.interval if self._last else SHORTEST_PACE
        return min(interval, SHORTEST_PACE if self._is_ending else LONGEST_PACE)

    def pause(self, bound: float = math.inf) -> None:
        """Waits until the run is worth polling again: at most ``bound`` seconds, or until its driver has ended."""
        self.renew_if_due()
        interval = max(0.0, min(max(self.pace, FOLLOW_INTERVAL), bound))
        if self._driver is not None and self._driver.poll() is None:
            self._driver.await_end(interval)
        else:
            time.sleep(interval)

    def cancelled_for(self) -> dict[str, Any]:
        """Returns the try for which the end of this submission was requested; empty if none, or for all tries."""
        return dict((self.own.cancel_request() or {}).get("receiver", {}))

    # -- the lease -------------------------------------------------------------------------------

    @property
    def renewal_interval(self) -> float:
        """Seconds after which a follower has to call `renew_lease` again; 0 if the run has no ``orphan_timeout``."""
        return 0.0 if self._lease is None or not self._follows else self.own.renewal_interval(self._lease)

    def renew_lease(self) -> None:
        """Reports to the driver that the run is followed, as methods that wait for the run or read its lines do."""
        if self._follows:
            # It keeps the bound that a follower has given it.
            bound = bound_of(self.own.lease())
            self.own.renew_lease(bound)
            self._lease = bound or self._lease

    def hold(self, bound: float) -> None:
        """Replaces the run's ``orphan_timeout``: it ends if this handle does not follow it for ``bound`` seconds.

        The last follower of a run calls this, since the run would otherwise wait its ``orphan_timeout`` for the next.
        """
        self._lease = bound
        self.own.renew_lease(bound)

    def renew_if_due(self) -> None:
        """Calls `renew_lease` if the last call was `renewal_interval` ago; an error of the store is ignored."""
        # A store that fails now must not end the follower.
        with contextlib.suppress(Exception):
            if self.renewal_interval and time.monotonic() - self._renewed > self.renewal_interval:
                self._renewed = time.monotonic()
                self.renew_lease()

    # -- the result ------------------------------------------------------------------------------

    def result_ref(self, timeout: float | None = None) -> ResultRef:
        """Waits for the end of the run and returns the handle of rank 0's value.

        Raises:
            TimeoutError: the run has not ended after ``timeout`` seconds.
            RankZeroError: the run did not succeed; the type of the error tells the reason.
        """
        return self._ref(self._outcome(timeout))

    def result(self, timeout: float | None = None) -> R:
        """Waits for the end of the run and returns rank 0's value. Raises like `result_ref`."""
        status = self._outcome(timeout)
        if status.value:
            return cast(R, status.value[0])
        return cast(R, self._ref(status).load())

    def _outcome(self, timeout: float | None) -> RunStatus:
        status = next((one for one in self._polls(timeout) if one.final), None)
        if status is None:
            raise TimeoutError(f"run {self.id} is still running after {timeout} s; the timeout ended only the wait")
        if status.error is not None:
            raise error_from_json(status.error).locate(self.directory)
        if status.result is None:
            raise ResultError(f"run {self.id} ended as {status.state} without a result").locate(self.directory)
        # The value may be a pickle, and its checksum is in the same directory. Root is not checked.
        is_root = getattr(os, "geteuid", int)() == 0
        if not is_root and (why := store.why_untrusted(self.directory)):
            raise ResultError(f"the run directory {self.directory} {why}")
        return status

    def _ref(self, status: RunStatus) -> ResultRef:
        """Returns the handle of the value, in this directory even if that was moved since."""
        ref = ResultRef.from_json(cast("dict[str, Any]", status.result))
        return ref if ref.uri.startswith(f"{self.directory}/") else replace(ref, uri=self.own.result_path(ref.uri))

    def delivery(self) -> Delivery:
        """Returns the receiver of this submission's result, and whether it has acknowledged the result."""
        return self.own.delivery()

    def offer(self, receiver: Mapping[str, Any]) -> None:
        """Records the receiver of the result (JSON values by name) before the result is delivered.

        Raises:
            RunNotFoundError: the run was removed.
        """
        self._patiently(self.own.status)
        self.own.record_delivery(Delivery(dict(receiver)))

    def acknowledge(self) -> None:
        """Records that the receiver has stored the result, so that submitting this run id again trains from scratch.

        Without this, another submission of the same training under this id gets this result and does not train. A run
        that was cancelled for good can be acknowledged, too: without this, another submission resumes it.

        Raises:
            ResultError: the run has no result yet, or has failed.
            RunNotFoundError: the run was removed.
        """
        status = self.status()
        if status.result is None and status.state != "cancelled":
            raise ResultError(f"run {self.id} has no result that could be acknowledged: it is {status.state}")
        self.own.record_delivery(replace(self.own.delivery(), acknowledged=True))

    # -- what the ranks wrote --------------------------------------------------------------------

    def checkpoints(self) -> list[Manifest]:
        """Returns the committed checkpoints of the training, oldest first."""
        return list_committed([*self.own.earlier(), self.own.directory])

    def stream(self, name: str, *, earlier: bool = True) -> Stream:
        """Returns a reader of `LINES` or `EVENTS` of this training; without ``earlier`` of this submission only."""
        return Stream([*(self.own.earlier() if earlier else ()), self.own.directory], name, self._read_as_follower)

    def _read_as_follower(self, read: Callable[[], T]) -> T:
        # Reading may take long.
        self.renew_if_due()
        return self._patiently(read)

    def lines(
        self, ranks: Collection[int] | None = None, follow: bool = False, *, earlier: bool = True
    ) -> Iterator[Line]:
        """Yields the lines of these ranks, each with its time and rank, and notes about lines of all ranks.

        `logs` is built on this. Without ``earlier`` it leaves out lines of earlier submissions.
        """
        stream = self.stream(LINES, earlier=earlier)
        for status in self._polls() if follow else [None]:
            yield from parsed(stream.new(status), ranks)

    def logs(self, rank: int | None = None, follow: bool = False) -> Iterator[str]:
        """Yields the lines that the ranks of this training wrote, in every attempt.

        Args:
            rank: The rank whose lines are yielded; None yields those of all ranks with a ``[rank]`` prefix, in the
                order in which the driver received them.
            follow: Continues until the run ends. Lines of a rank that prints little come about twice a second.
        """
        for line in self.lines(None if rank is None else [rank], follow):
            yield line.prefixed if rank is None else line.text

    def events(self, follow: bool = False) -> Iterator[dict[str, Any]]:
        """Yields state changes, metrics and failures of this training, in the order in which the driver received them.

        Events of an earlier training with the same run id are left out. Each event is a dict with ``time`` and
        ``type`` (``"state"``, ``"metric"``, ``"checkpoint"``, ``"failure"``, ``"restart"``, ``"engine"``,
        ``"waiting"``, ``"world"``, ``"bad-host"``). Events of type ``"state"`` also have ``submission``,
        ``attempt`` and ``run_id``.
        """
        stream = self.stream(EVENTS)
        for status in self._polls() if follow else [None]:
            yield from events_of(stream.new(status))

    def metrics(self) -> list[dict[str, Any]]:
        """Returns the reports of the ranks of this training: rows with ``rank``, ``time`` and the metrics' names.

        A metric that is itself named ``rank`` or ``time`` is ``metrics.rank`` or ``metrics.time`` there.
        """
        return [
            as_row(event["metrics"], {"rank": event["rank"], "time": event["time"]})
            for event in self.events()
            if event["type"] == "metric"
        ]
