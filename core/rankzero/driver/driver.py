"""`Driver`: makes the attempts of a run and writes its outcome, in the caller's process or in its own."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Mapping
from typing import Any

from rankzero import store
from rankzero.bounds import STORE_OUTAGE
from rankzero.driver import policy
from rankzero.driver.attempt import Attempt
from rankzero.driver.handover import RETRY_INTERVAL, DrivenElsewhere, Handover, Unseen
from rankzero.driver.places import CLOSE_TIMEOUT, Places
from rankzero.driver.policy import HostRecord, Placement, Restarts, Start, spent
from rankzero.driver.recorder import Recorder
from rankzero.driver.reporter import Reporter
from rankzero.driver.tables import Tables, remove_computed
from rankzero.driver.trackers import Trackers
from rankzero.driver.watch import Inbox, Watch
from rankzero.engines.base import Engine, EngineSession
from rankzero.errors import (
    HANG,
    EngineError,
    HangError,
    RankZeroError,
    RunCancelledError,
    RunNotFoundError,
    RunTimeoutError,
    WorkerFailedError,
)
from rankzero.host.processes import allow_open_files
from rankzero.job import Job
from rankzero.masking import Mask, secrets_of
from rankzero.run.directory import RunDirectory, RunStatus

logger = logging.getLogger(__name__)


MANY_AGENTS = 256
"""Number of agents above which the limit of open files is raised even in a caller's own process."""


class Driver:
    """Runs one submission of a run to its end and writes the outcome into the run directory."""

    def __init__(
        self,
        run: RunDirectory,
        engine: Engine,
        env: dict[str, str],
        *,
        leased: bool = False,
        start: Start | None = None,
        trackers: Mapping[str, Any] | None = None,
    ) -> None:
        """Reads the job of the run and prepares the run directory for this driver.

        Args:
            run: The run.
            engine: The engine that places the agents.
            env: The user's environment for the ranks.
            leased: True if the run outlives its caller, and cancels itself when no process follows it
                (`Job.orphan_timeout`).
            start: The attempt and the budget that a driver in its run's own stage begins with; the process that
                submitted the stage has the run again if this driver dies. None for every other driver.
            trackers: The result of `rankzero.submit.trackers.pack`, or None.
        """
        self._run = run
        self._job = run.job()
        self._env = env
        self._mask = Mask(secrets_of(env) + secrets_of(engine.to_spec()[1].get("conf", {})))
        self._is_in_stage = start is not None
        self._number = start.attempt if start else self._job.first_attempt
        self._budget = start.budget if start else Restarts(self._job.max_restarts, self._job.max_preemptions)
        self.inbox = Inbox()
        self._leased = leased
        # Tables are computed by this process's session, so a run with queries is driven from this process.
        self._may_delegate = leased and not self._job.queries
        self._packed_trackers = trackers
        self._begin_writing(self._status_of_before() if start else None)
        self._places = Places(engine, self._job, self.inbox, self._check, self._report)
        self._started_at: float | None = None

    def _status_of_before(self) -> RunStatus | None:
        """Returns the last status that another driver of this submission wrote; None if there was no other driver."""
        with contextlib.suppress(RunNotFoundError):
            return store.patiently(
                self._run.status, STORE_OUTAGE, RETRY_INTERVAL, lambda error: isinstance(error, RunNotFoundError)
            )
        return None

    def _begin_writing(self, before: RunStatus | None) -> None:
        """Makes this process the writer of the run directory, continuing from the status of the driver before it, if
        any.
        """
        self._recorder = Recorder(
            self._run,
            self._job.submission,
            self._number,
            self._mask,
            is_in_stage=self._is_in_stage,
            nonce=self._job.nonce,
        )
        self._watch = Watch(self._run, self._job, self._recorder, self.inbox, leased=self._leased)
        if before:
            self._recorder.carry_on(before)
        self._trackers = Trackers(self._run, self._job.fresh_since, self._packed_trackers)

    def run(self) -> None:
        """Runs the submission until it has ended. A failed run does not raise: its status reports the failure.

        Raises:
            ResultError: the store does not take the outcome.
        """
        self._recorder.note_thread()
        reporter = Reporter(self._run)
        if not self._may_delegate:
            self._trackers.start()
        try:
            self._run_to_its_end()
        finally:
            self._trackers.close()
            reporter.close()

    def _run_to_its_end(self) -> None:
        try:
            attempt = self._attempt_until_done()
        except DrivenElsewhere:
            # The other driver runs the trackers, too.
            self._trackers = Trackers(self._run, self._job.fresh_since, None)
            return
        except RunCancelledError as error:
            self._recorder.finish(state="cancelled", error=error.to_json())
        except RankZeroError as error:
            self._recorder.finish(state="failed", error=error.to_json())
        except BaseException as error:
            logger.exception("the driver failed")
            what = EngineError(f"the driver failed: {type(error).__name__}: {error}")
            self._recorder.finish(state="failed", error=what.to_json())
        else:
            assert attempt.outcome is not None
            result, value = attempt.outcome
            # Before the final status: the next submission may write new rows as soon as it sees that.
            remove_computed(self._job)
            self._recorder.finish(state="succeeded", result=result.to_json(), value=value)
        finally:
            self._trackers.end()
            # After the final status, so callers do not wait while a SparkContext stops, which takes a second.
            self._places.close()

    @property
    def status(self) -> RunStatus:
        """The status of the run as this driver has it in memory."""
        return self._recorder.status

    @property
    def left_nothing(self) -> bool:
        """False if an engine session did not close, so a JVM that was stopped may still exist."""
        return self._places.left_nothing

    @property
    def superseded(self) -> bool:
        """True if another driver has the run by now, which this one detected too late."""
        return self._recorder.superseded

    def _attempt_until_done(self) -> Attempt:
        """Makes attempts until one succeeds; raises the error of the last one when no further attempt is allowed."""
        hosts = HostRecord()
        try:
            while True:
                attempt: Attempt | None = None
                try:
                    number = self._number
                    self._recorder.update(state="starting", attempt=number, preemptions=self._budget.preemptions)
                    deadline = time.monotonic() + self._job.start_timeout
                    session = self._places.session or self._open(deadline)
                    if self._job.queries:
                        self._job = self._read_tables(session)
                        deadline = time.monotonic() + self._job.start_timeout
                    placement = self._places.gather(session, deadline, hosts.bad)
                    self._note_placement(number, placement, session)
                    if session.num_agents(placement.num_tasks) > MANY_AGENTS:
                        allow_open_files()
                    if self._may_delegate and session.can_host_driver:
                        self._delegate(session, placement, deadline)
                    self._trackers.start()
                    attempt = Attempt(
                        self._run, self._job, number, self._recorder, session, placement, self.inbox, self._watch
                    )
                    attempt.run(deadline, self._env, self._started_at)
                    return attempt
                except BaseException as error:
                    if attempt and attempt.outcome:
                        # Success was certain before this error.
                        return attempt
                    after = self._budget.after(_restart_cause(error))
                    if after is None:
                        raise
                    self._budget, pause = after
                    hosts = hosts.after(attempt.failed_host if attempt else None)
                    self._note_restart(self._number + 1, error, pause)
                if self._started_at is None and attempt:
                    self._started_at = attempt.started_at
                self._number += 1
                self._prepare_restart(pause)
        except BaseException:
            # Processes that an attempt left behind end with the session, so it closes before the run has ended.
            self._places.close()
            raise

    def _delegate(self, session: EngineSession, placement: Placement, deadline: float) -> None:
        """Delegates the run to a driver inside its own stage; returns if executors do not see the run directory.

        Raises:
            DrivenElsewhere: the run was delegated, and this process has nothing more to do.
            RankZeroError: the run could not be delegated, or that driver was lost; this process drives the run again.
        """
        handover = Handover(
            self._run, self._job, self._number, self._recorder, session, placement, self.inbox, self._watch
        )
        try:
            handover.run(deadline, self._env, self._budget, self._packed_trackers)
        except Unseen as why:
            self._may_delegate = False
            if handover.is_delegated:
                self._begin_writing(handover.last_status())
            self._report({"type": "handover", "what": f"the run is driven from this host, not in its stage: {why}"})
        except DrivenElsewhere:
            # Closing the session would end the stage, which may continue.
            self._places.session = None
            raise
        except BaseException:
            if handover.is_delegated:
                status = handover.last_status()
                if status:
                    self._number = max(self._number, status.attempt)
                    self._budget = spent(self._job, status)
                self._begin_writing(status)
            raise

    def _note_restart(self, attempt: int, error: BaseException, pause: float) -> None:
        what = str(error).splitlines()[0]
        logger.warning("attempt %s follows in %s s, because %s", attempt, pause, what)
        event = {"type": "restart", "attempt": attempt, "cause": _restart_cause(error), "what": what, "pause": pause}
        self._recorder.event(event)

    def _prepare_restart(self, pause: float) -> None:
        """Waits for the pause between two attempts, and closes the session if it is broken."""
        self._places.pause(pause)
        if self._places.is_broken():
            self._places.close()

    def _check(self) -> None:
        """Raises the typed error if the run must end while no attempt of it is running."""
        self._watch.check()
        timeout, started_at = self._job.timeout, self._started_at
        if timeout and started_at is not None and time.monotonic() - started_at > timeout:
            raise RunTimeoutError(f"the run took longer than timeout={timeout} s and was ended between two attempts")

    def _open(self, deadline: float) -> EngineSession:
        session, url = self._places.open(self._env, deadline)
        if url:
            self._recorder.update(engine_url=url)
        return session

    def _read_tables(self, session: EngineSession) -> Job:
        """Has the engine compute the tables that ranks read; this has no deadline, since it may take longer than any
        start.
        """
        tables = Tables(self._run, self._job, session)
        try:
            return self._places.in_thread(lambda: tables.read(self._places.say_from_thread), math.inf)
        except BaseException:
            tables.stop(CLOSE_TIMEOUT)
            raise

    def _note_placement(self, number: int, placement: Placement, session: EngineSession) -> None:
        """Records a world size or a set of hosts that differs from what the job alone would give."""
        world_size = self._job.sized(placement.num_tasks).num_processes
        if placement.left_out:
            hosts = ", ".join(sorted(placement.left_out))
            what = f"attempt {number} leaves out {hosts}, which failed {policy.FAILURES_OF_A_BAD_HOST} times"
            self._report({"type": "left-out", "attempt": number, "hosts": sorted(placement.left_out), "what": what})
        if self._job.min_processes is not None:
            what = f"attempt {number} starts with {world_size} ranks, of {self._job.world}, on {session.place}"
            self._report({"type": "world", "attempt": number, "world_size": world_size, "what": what})
            self._recorder.update(world_size=world_size)

    def _report(self, event: dict[str, Any]) -> None:
        """Records an event whose text followers of the run see among the lines of rank 0."""
        logger.info("%s", event["what"])
        self._recorder.event(event)
        self._recorder.log(0, [f"rankzero: {event['what']}"])


def _restart_cause(error: BaseException) -> str | None:
    if isinstance(error, HangError):
        return HANG
    return error.cause if isinstance(error, (WorkerFailedError, EngineError)) else None
