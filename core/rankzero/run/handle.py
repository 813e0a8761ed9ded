"""`RunHandle` gives access to a run from any process that can read its directory."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

from rankzero import store
from rankzero.errors import RankZeroError, ResultError, error_from_json, located
from rankzero.job import Job
from rankzero.run import delivery as deliveries
from rankzero.run.checkpoints import Manifest, list_committed
from rankzero.run.delivery import Delivery
from rankzero.run.directory import RunDirectory, Submission, compare_job
from rankzero.run.growing import Position
from rankzero.run.identity import Asked, Comparison, Identity
from rankzero.run.lease import Renewal
from rankzero.run.observer import Observer, OwnDriver
from rankzero.run.output import Output
from rankzero.run.reports import as_row
from rankzero.run.status import LONGEST_PACE, SHORTEST_PACE, RunStatus
from rankzero.values.ref import ResultRef

FOLLOW_INTERVAL = 0.05  # Seconds between two polls of a run directory on a local disk

R = TypeVar("R")
T = TypeVar("T")


class RunHandle(Generic[R]):
    """A handle of one submission of a run, for any process that can read its directory.

    If the run id is submitted again, everything stays that of the handle's own submission.

    Attributes:
        directory: Absolute path or URL of the run directory.
        id: The run's name.
        output: What its ranks and its driver have written, by position.
    """

    def __init__(
        self, directory: str, driver: OwnDriver | None = None, *, job: Job | None = None, follows: bool = True
    ) -> None:
        """Makes a handle without reading the store.

        Args:
            directory: The run directory.
            driver: The driver of ``job``, if this process has started it.
            job: Job of the handle's submission; None for the last one when the handle is first used.
            follows: False for a reader that does not keep the run alive.
        """
        self._run = RunDirectory(directory)
        self._driver = driver
        self._submission = Submission(self._run, job) if job else None
        self._observer = Observer(lambda: self.own, driver)
        self.directory = self._run.directory
        self.id = self.directory.rsplit("/", 1)[-1]
        self._interval = SHORTEST_PACE
        self._is_ending = False
        self._lease = Renewal(lambda: self.own) if follows else None
        self.output = Output(lambda: self._observer.patiently(lambda: self.own), self._read_as_follower, self._polls)

    @staticmethod
    def attach(directory: str | os.PathLike[str], *, follows: bool = True) -> RunHandle[Any]:
        """Returns the handle of an existing run.

        Args:
            directory: The run directory.
            follows: False for a reader that does not keep the run alive.

        Raises:
            RunNotFoundError: the directory holds no run.
        """
        handle: RunHandle[Any] = RunHandle(os.fspath(directory), follows=follows)
        # Reads the run, and so raises if there is none.
        with located(handle.directory):
            handle.own  # noqa: B018
        return handle

    @property
    def own(self) -> Submission:
        """The files of the handle's submission, which is the last one at the first access. Raises RunNotFoundError."""
        # Not a cached_property: in Python 3.11 a store that does not answer would hold its lock for all handles.
        if self._submission is None:
            self._submission = self._run.current()
        return self._submission

    @property
    def job(self) -> Job:
        """The job of the submission. Raises RunNotFoundError."""
        return self.own.job

    @property
    def labels(self) -> dict[str, str]:
        """Returns the `Launcher.labels` of the submission."""
        return dict(self.job.labels)

    @property
    def params(self) -> dict[str, Any]:
        """Returns the arguments by name, as short plain values, for people and trackers.

        A value other than a number, a text or a bool is replaced by the name of its type, and a value whose name looks
        secret by ``***``. For a script, each ``--name value`` of the command line is an argument.
        """
        return dict(self.job.params)

    @property
    def world_size(self) -> int:
        """Returns the number of ranks; of an elastic run that of its last attempt, or the most."""
        job = self.job
        return (job.min_processes and self._observer.patiently(self.own.status).world_size) or job.num_processes

    @property
    def identity(self) -> str:
        """Returns the digest that two submissions of the same training share; see `Launcher.identity`."""
        return self.job.identity

    def compare(self, identity: Identity, generation: str = "") -> Comparison:
        """Compares the training with another one.

        Args:
            identity: Identity of the other training; see `Launcher.identity`.
            generation: Name of the chain of tries that an orchestrator starts by itself; empty outside of one.
        """
        return compare_job(self.job, Asked(identity, generation))

    @property
    def code_version(self) -> str | None:
        """Returns the `Launcher.code_version` of the submission."""
        return self.job.code_version

    @property
    def submission(self) -> int:
        """Returns the number of the submission, from 0."""
        return self.job.submission

    @property
    def nonce(self) -> str:
        """Returns random digits that identify the submission, also after the directory was removed and reused."""
        return self.job.nonce

    @property
    def training(self) -> str:
        """Returns the name of the training, which its first submission has given it, and which no other one has."""
        return self.job.earlier[0] if self.job.earlier else self.own.name

    @property
    def created(self) -> float:
        """Returns the Unix time of the submission."""
        return self.job.created

    @property
    def beginning(self) -> str:
        """Returns where the submission began and why: "resumed from checkpoint ..." or "from scratch: ..."."""
        return self.job.beginning

    def __repr__(self) -> str:
        return f"RunHandle({self.directory!r})"

    def _repr_html_(self) -> str | None:
        """The run in a notebook: its state, progress and curves."""
        from rankzero.report.card import draw

        with contextlib.suppress(RankZeroError, OSError):
            return draw(self)
        return None

    def status(self) -> RunStatus:
        """Returns the current state of the run.

        A run whose driver died is reported as failed, unless its end is recorded.
        """
        return self._seen(self._observer.store_timeout)

    def _seen(self, timeout: float) -> RunStatus:
        status = self._observer.status(timeout)
        self._interval = status.interval
        return status

    def driver_lives(self, status: RunStatus) -> bool | None:
        """Returns whether the driver lives; None if this process cannot query it and only the heartbeat decides."""
        return self._observer.driver_lives(status)

    def _read_as_follower(self, read: Callable[[], T]) -> T:
        """Reads the store as a follower: renews the lease, since reading may take long, and retries after errors."""
        if self._lease:
            self._lease.renew_if_due()
        return self._observer.patiently(read)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the run has ended, with any outcome.

        Args:
            timeout: Seconds to wait; None waits without a limit.

        Returns:
            True if the run has ended, False if the timeout has passed.
        """
        return self._end(timeout) is not None

    def _end(self, timeout: float | None) -> RunStatus | None:
        """Waits as `wait` does, and returns the status of the run that has ended; None if the timeout has passed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self._observer.patiently(lambda: self.own, self._observer.store_timeout_until(deadline))
        while not (status := self._seen(self._observer.store_timeout_until(deadline))).final:
            if deadline is not None and time.monotonic() >= deadline:
                return None
            self.pause(math.inf if deadline is None else deadline - time.monotonic())
        return status

    def await_driver(self, timeout: float) -> None:
        """Waits until the driver of an ended run has also finished its trackers and its report.

        Args:
            timeout: Seconds to wait at most. Returns immediately if another process started the driver.
        """
        if self._driver is not None:
            self._driver.await_end(timeout)

    @property
    def pace(self) -> float:
        """Returns the seconds after which the driver writes to an object store again; 0 on a disk."""
        if not self._run.is_remote:
            return 0.0
        return min(self._interval, SHORTEST_PACE if self._is_ending else LONGEST_PACE)

    def pause(self, bound: float = math.inf) -> None:
        """Waits until the run is worth polling again: at most ``bound`` seconds, or until its driver has ended."""
        if self._lease:
            self._lease.renew_if_due()
        interval = max(0.0, min(max(self.pace, FOLLOW_INTERVAL), bound))
        if self._driver is not None and self._driver.poll() is None:
            self._driver.await_end(interval)
        else:
            time.sleep(interval)

    def renew_lease(self) -> None:
        """Reports to the driver that the run is followed, as methods that wait for the run or read its lines do.

        Raises OSError if the store cannot be written.
        """
        if self._lease:
            self._lease.renew()

    @property
    def renewal_interval(self) -> float:
        """Seconds after which a follower has to call `renew_lease` again; 0 if the run has no ``orphan_timeout``."""
        return self._lease.interval if self._lease else 0.0

    def hold(self, bound: float) -> None:
        """Replaces the run's ``orphan_timeout``: it ends if this handle does not follow it for ``bound`` seconds.

        The last follower of a run calls this, since the run would otherwise wait its ``orphan_timeout`` for the next.
        Raises OSError if the store cannot be written.
        """
        if self._lease:
            self._lease.hold(bound)

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
        status = self._end(timeout)
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
        return deliveries.read(self.own.directory)

    def offer(self, receiver: Mapping[str, Any]) -> None:
        """Records the receiver of the result (JSON values by name) before the result is delivered.

        Raises:
            RunNotFoundError: the run was removed.
            OSError: the store cannot be written.
        """
        self._observer.patiently(self.own.status)
        deliveries.write(self.own.directory, Delivery(dict(receiver)))

    def acknowledge(self) -> None:
        """Records that the receiver has stored the result, so that submitting this run id again trains from scratch.

        Without this, another submission of the same training under this id gets this result and does not train. A run
        that was cancelled for good can be acknowledged, too: without this, another submission resumes it.

        Raises:
            ResultError: the run has no result yet, or has failed.
            RunNotFoundError: the run was removed.
            OSError: the store cannot be written.
        """
        status = self.status()
        if status.result is None and status.state != "cancelled":
            raise ResultError(f"run {self.id} has no result that could be acknowledged: it is {status.state}")
        deliveries.write(self.own.directory, replace(self.delivery(), acknowledged=True))

    def checkpoints(self) -> list[Manifest]:
        """Returns the committed checkpoints of the training, oldest first."""
        own = self.own
        return list_committed([*own.earlier(), own.directory])

    def cancel(self, receiver: Mapping[str, Any] | None = None, reason: str = "") -> None:
        """Requests the end of the run; call `wait` for the end. Does nothing if the run has ended.

        The request concerns only the submission that this handle was made for, and no later one.

        Args:
            receiver: The orchestrator's try whose end also ends the run, as in `offer`. Another try that follows the
                run by then finds this in `cancelled_for`, and may submit the run again.
            reason: The cause of the request, which the error of the run shows.
        """
        self._is_ending = True
        self._observer.cancel(receiver, reason)

    def cancelled_for(self) -> dict[str, Any]:
        """Returns the try for which the end of this submission was requested; empty if none, or for all tries.

        Raises:
            OSError: the store cannot be read.
        """
        return dict((self.own.cancel_request() or {}).get("receiver", {}))

    def logs(self, rank: int | None = None, follow: bool = False) -> Iterator[str]:
        """Yields the lines that the ranks of this training wrote, in every attempt.

        Args:
            rank: The rank whose lines are yielded; None yields those of all ranks with a ``[rank]`` prefix, in the
                order in which the driver received them.
            follow: Continues until the run ends. Lines of a rank that prints little come about twice a second.
        """
        for line in self.output.lines(Position(), follow, ranks=None if rank is None else [rank]):
            yield line.prefixed if rank is None else line.text

    def events(self, follow: bool = False) -> Iterator[dict[str, Any]]:
        """Yields state changes, metrics and failures of this training, in the order in which the driver received them.

        Events of an earlier training with the same run id are left out. Each event is a dict with ``time`` and
        ``type`` (``"state"``, ``"metric"``, ``"checkpoint"``, ``"failure"``, ``"restart"``, ``"engine"``,
        ``"waiting"``, ``"world"``, ``"bad-host"``). Events of type ``"state"`` also have ``submission``,
        ``attempt`` and ``run_id``.
        """
        position = Position()
        for status in self._polls() if follow else [None]:
            while True:
                before = position
                events, position = self.output.read_events(before, status)
                yield from events
                if position == before:
                    break

    def _polls(self) -> Iterator[RunStatus]:
        """Yields a status for every poll of the run; the last one is read after the end of the run."""
        while not (status := self.status()).final:
            yield status
            self.pause()
        yield status

    def metrics(self) -> list[dict[str, Any]]:
        """Returns the reports of the ranks of this training: rows with ``rank``, ``time`` and the metrics' names.

        A metric that is itself named ``rank`` or ``time`` is ``metrics.rank`` or ``metrics.time`` there.
        """
        return [
            as_row(event["metrics"], {"rank": event["rank"], "time": event["time"]})
            for event in self.events()
            if event["type"] == "metric"
        ]
