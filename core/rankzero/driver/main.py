"""The driver: owns the engine and decides about attempts. In the caller's process or in its own.

``python -m rankzero.driver RUN_DIR --submission N`` is the detached form; what it needs is in the run directory, except
what may hold secrets, which is in no file: its submitter gives it the user's environment and the engine's private
configuration on standard input, as JSON. Both forms run `Driver.run`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar, cast

from rankzero.driver import policy, succession
from rankzero.driver.attempt import Attempt
from rankzero.driver.handover import DrivenElsewhere, Handover, Unseen
from rankzero.driver.policy import HostRecord, Placement, Restarts
from rankzero.driver.recorder import Recorder
from rankzero.driver.reporter import Reporter
from rankzero.driver.succession import Start
from rankzero.driver.tables import Tables
from rankzero.driver.trackers import Trackers
from rankzero.driver.watch import DRIVER, TICK, Inbox, Watch
from rankzero.engines.base import Engine, EngineSession, within, words_of
from rankzero.errors import (
    HANG,
    LOST,
    EngineError,
    HangError,
    RankZeroError,
    RunCancelledError,
    RunNotFoundError,
    RunTimeoutError,
    StartTimeoutError,
    WorkerFailedError,
)
from rankzero.host import descendants
from rankzero.host.processes import allow_open_files, is_gone, pidfd_of
from rankzero.job import Job
from rankzero.masking import Mask, secrets_of
from rankzero.run.directory import RunDirectory

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT = 10.0
"""Seconds for an engine session to close (a SparkContext to stop)."""

SLOTS_INTERVAL = 0.1
"""Seconds between two looks at the number of slots of a cluster."""

MANY_AGENTS = 256
"""Agents from which on the limit of open files is raised in a caller's own process, too."""

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
"""Of a driver's own log."""

_SIGNALLED = 128
"""And the number of a signal: the exit code of a process that it has ended."""

_DONE = "engine-done"
_SAY = "engine-says"

T = TypeVar("T")


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
        """Reads what is to be run.

        Args:
            run: The run.
            engine: Where.
            env: The user's environment for the ranks.
            leased: True if the run ends when nobody follows it (`Job.orphan_timeout`), and outlives its caller.
            start: Of a driver that another process follows should this one die; None for one that stands alone.
            trackers: What `rankzero.submit.trackers.pack` has made, or None.
        """
        self._run = run
        self._engine = engine
        self._job = run.job()
        self._env = env
        self._mask = Mask(secrets_of(env) + secrets_of(engine.to_spec()[1].get("conf", {})))
        self._start = start
        self._number = start.attempt if start else self._job.first_attempt
        self._budget = start.budget if start else Restarts(self._job.max_restarts, self._job.max_preemptions)
        self.inbox = Inbox()
        self._leased = leased
        # What Spark computes for ranks comes by this session, and so to this process.
        self._hands_over = leased and not self._job.queries
        self._packed_trackers = trackers
        self._take_over(follows=start is not None)
        self._session: EngineSession | None = None
        self._started_at: float | None = None
        self.left_nothing = True
        """False if an engine session did not close: a JVM that was stopped may still be there."""

    def _take_over(self, *, follows: bool) -> None:
        """From now on this process writes the run directory; another driver of the submission may have before."""
        self._recorder = Recorder(self._run, self._job.submission, self._number, self._mask, self._start)
        self._watch = Watch(self._run, self._job, self._recorder, self.inbox, leased=self._leased)
        if follows:
            with contextlib.suppress(RunNotFoundError):
                self._recorder.carry_on(self._run.status())
        self._trackers = Trackers(self._run, self._job.fresh_since, self._packed_trackers)

    def run(self) -> None:
        """Never raises for a run that failed: the status reports it.

        Raises:
            ResultError: the store does not take the outcome.
        """
        reporter = Reporter(self._run)
        if not self._hands_over:
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
            # So are its trackers.
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
            self._recorder.finish(state="succeeded", result=result.to_json(), value=value)
        finally:
            self._trackers.end()
            # Nobody who waits for the result waits for this: a SparkContext takes a second to stop.
            self._close_session()

    @property
    def superseded(self) -> bool:
        """True if the run has another driver by now, which this one found too late."""
        return self._recorder.superseded

    def _attempt_until_done(self) -> Attempt:
        """One attempt after the other, until one succeeds or nothing more may be tried."""
        hosts = HostRecord()
        if self._start and self._start.lost:
            self._note_restart(self._number, self._start.lost, 0.0)
        try:
            while True:
                attempt: Attempt | None = None
                try:
                    number = self._number
                    self._recorder.update(state="starting", attempt=number, preemptions=self._budget.preemptions)
                    deadline = time.monotonic() + self._job.start_timeout
                    self._session = session = self._session or self._open(deadline)
                    if self._job.queries:
                        self._job = self._read_tables(session)
                        deadline = time.monotonic() + self._job.start_timeout
                    placement = self._gather(session, deadline, hosts.bad)
                    self._note_placement(number, placement, session)
                    if session.num_agents(placement.num_tasks) > MANY_AGENTS:
                        allow_open_files()
                    if self._hands_over and session.can_host_driver:
                        self._hand_over(session, placement, deadline)
                    self._trackers.start()
                    attempt = Attempt(
                        self._run, self._job, number, self._recorder, session, placement, self.inbox, self._watch
                    )
                    attempt.run(deadline, self._env, self._started_at)
                    return attempt
                except BaseException as error:
                    if attempt and attempt.outcome:
                        # Success was certain before whatever came then.
                        return attempt
                    self._leave_if_replaced()
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
            # What an attempt has left ends with the session, and so before the run has ended.
            self._close_session()
            raise

    def _hand_over(self, session: EngineSession, placement: Placement, deadline: float) -> None:
        """Has the run driven in its own stage; returns if executors do not see its directory.

        Raises:
            DrivenElsewhere: that was done, and this process has nothing more to do.
            RankZeroError: that came to nothing, or was lost; this process has the run again.
        """
        handover = Handover(
            self._run, self._job, self._number, self._recorder, session, placement, self.inbox, self._watch
        )
        try:
            handover.run(deadline, self._env, self._budget, self._packed_trackers)
        except Unseen as why:
            logger.info("%s: it is driven from here", why)
            self._hands_over = False
        except DrivenElsewhere:
            # To close it would end the stage, which may go on.
            self._session = None
            raise
        except BaseException:
            if handover.has_gone:
                status = self._run.status()
                self._number = max(self._number, status.attempt)
                self._budget = succession.spent(self._job, status)
                self._take_over(follows=True)
            raise

    def _note_restart(self, attempt: int, error: BaseException, pause: float) -> None:
        what = str(error).splitlines()[0]
        logger.warning("attempt %s follows in %s s, because %s", attempt, pause, what)
        event = {"type": "restart", "attempt": attempt, "cause": _restart_cause(error), "what": what, "pause": pause}
        self._recorder.event(event)

    def _prepare_restart(self, pause: float) -> None:
        """Waits, and gives up a session that is broken."""
        self._pause(pause)
        if self._is_broken():
            self._close_session()

    def _is_broken(self) -> bool:
        session, answers = self._session, list[bool]()
        # A JVM that was stopped does not answer at all.
        return session is not None and not (
            within(CLOSE_TIMEOUT, lambda: answers.append(session.is_usable())) and answers == [True]
        )

    def _leave_if_replaced(self) -> None:
        """Ends this process if its session has, as that of a pod which is shut down: the next one has another."""
        if self._start and self._start.number is not None and self._is_broken():
            logger.warning("the SparkContext of this driver has ended, and so does this driver")
            os._exit(1)

    def _pause(self, seconds: float) -> None:
        """Waits within the reach of a cancel and of the run's timeout."""
        end = time.monotonic() + seconds
        while True:
            self._check()
            left = end - time.monotonic()
            if left <= 0:
                return
            with contextlib.suppress(queue.Empty):
                self.inbox.queue.get(timeout=min(left, TICK))

    def _check(self) -> None:
        """Raises the typed error if the run is to end while no attempt of it runs."""
        self._watch.check()
        timeout, started_at = self._job.timeout, self._started_at
        if timeout and started_at is not None and time.monotonic() - started_at > timeout:
            raise RunTimeoutError(f"the run took longer than timeout={timeout} s and was ended between two attempts")

    def _close_session(self) -> None:
        session, self._session = self._session, None
        if session:
            self.left_nothing = within(CLOSE_TIMEOUT, session.close)

    def _open(self, deadline: float) -> EngineSession:
        session, url = self._in_thread(self._open_engine, deadline)
        for note in session.notes:
            self._say({"type": "engine", "what": note})
        if url:
            self._recorder.update(engine_url=url)
        return session

    def _open_engine(self) -> tuple[EngineSession, str | None]:
        self._engine.start_ahead(self._job, self._env)
        session, url = self._engine.open(self._job), None
        # A link for people is not worth a run.
        with contextlib.suppress(Exception):
            url = session.url
        return session, url

    def _read_tables(self, session: EngineSession) -> Job:
        """Has the engine compute what ranks read; that may take longer than any start."""
        tables = Tables(self._run, self._job, session)
        try:
            return self._in_thread(lambda: tables.read(self._say_from_thread), math.inf)
        except BaseException:
            tables.stop(CLOSE_TIMEOUT)
            raise

    def _gather(self, session: EngineSession, deadline: float, bad: frozenset[str]) -> Placement:
        """Waits for the places of the next attempt.

        Raises:
            StartTimeoutError: there were not enough before the deadline.
            RunTimeoutError: the run had started, and took longer than its timeout.
            EngineError: the session ended meanwhile.
        """
        job, began = self._job, time.monotonic()
        changed, say_at, before = began, began + policy.WAITING_INTERVAL, -1
        least = job.least_tasks
        while True:
            slots, provable, by_host = self._in_thread(lambda: _look(session, by_host=bool(bad)), deadline)
            # What is there counts more than what was thought to be provable.
            most = max(least, min(job.num_tasks, provable or job.num_tasks))
            now = time.monotonic()
            if slots != before:
                before, changed = slots, now
            on_bad = {host: count for host, count in by_host.items() if host in bad}
            waited = job.start_timeout - (deadline - now)
            placement = policy.place(slots, least, most, now - changed, waited, job.start_timeout, on_bad)
            if placement and session.reserve(placement.num_tasks + placement.spare):
                return placement
            what = policy.waiting_message(session.place, slots, least, most, now - began, job.start_timeout)
            if now > deadline and slots < least:
                missing = [f"task {task}" for task in range(slots, least)]
                raise StartTimeoutError(f"{what}: add what is missing, or lower num_processes", missing=missing)
            if now > say_at:
                say_at = now + policy.WAITING_INTERVAL
                self._say({"type": "waiting", "what": what})
            self._pause(SLOTS_INTERVAL)

    def _note_placement(self, number: int, placement: Placement, session: EngineSession) -> None:
        """Says what is not as the job alone has it."""
        world_size = self._job.sized(placement.num_tasks).num_processes
        if placement.left_out:
            hosts = ", ".join(sorted(placement.left_out))
            what = f"attempt {number} leaves out {hosts}, which failed {policy.FAILURES_OF_A_BAD_HOST} times"
            self._say({"type": "left-out", "attempt": number, "hosts": sorted(placement.left_out), "what": what})
        if self._job.min_processes is not None:
            what = f"attempt {number} starts with {world_size} ranks, of {self._job.world}, on {session.place}"
            self._say({"type": "world", "attempt": number, "world_size": world_size, "what": what})
            self._recorder.update(world_size=world_size)

    def _say(self, event: dict[str, Any]) -> None:
        """An event whose text whoever follows the run sees among the lines of rank 0."""
        logger.info("%s", event["what"])
        self._recorder.event(event)
        self._recorder.log(0, [f"rankzero: {event['what']}"])

    def _say_from_thread(self, what: str) -> None:
        self.inbox.queue.put((DRIVER, {"type": _SAY, "what": what}))

    def _in_thread(self, action: Callable[[], T], deadline: float) -> T:
        """Runs an engine's action in a thread, so that a cluster that does not answer cannot hold us."""
        messages = self.inbox.renew()
        began = time.monotonic()
        # What has no deadline says itself how far it is.
        say_at = math.inf if deadline == math.inf else began + policy.WAITING_INTERVAL

        def act() -> None:
            result: T | None = None
            failure: RankZeroError | None = None
            try:
                result = action()
            except RankZeroError as error:
                failure = error
            except BaseException as error:
                failure = EngineError(f"the engine could not be opened: {words_of(error)}")
            messages.put((DRIVER, {"type": _DONE, "result": result, "failure": failure}))

        threading.Thread(target=act, name="rankzero-engine", daemon=True).start()
        while True:
            with contextlib.suppress(queue.Empty):
                _, message = messages.get(timeout=TICK)
                if message["type"] == _SAY:
                    self._say({"type": "engine", "what": message["what"]})
                if message["type"] == _DONE:
                    if message["failure"]:
                        raise message["failure"]
                    return cast(T, message["result"])
            self._check()
            now = time.monotonic()
            if now > say_at:
                say_at = now + policy.WAITING_INTERVAL
                what = f"waiting for the engine {self._job.engine} to answer, for {now - began:.0f} s"
                self._say({"type": "waiting", "what": what})
            if now > deadline:
                raise StartTimeoutError(
                    f"the engine {self._job.engine} did not answer within start_timeout={self._job.start_timeout} s",
                    missing=["engine"],
                )


def _look(session: EngineSession, *, by_host: bool) -> tuple[int, int | None, dict[str, int]]:
    """The slots of a session, the most that it can have, and those of each host.

    Raises:
        EngineError: the session has ended; with another one the run can go on.
    """
    ended = EngineError(
        f"the SparkContext or its JVM ended while the run waited for the slots of {session.place}", cause=LOST
    )
    try:
        found = session.slots(), session.most_slots, session.slots_by_host() if by_host else {}
    except Exception as error:
        if session.is_usable():
            raise
        raise ended from error
    if not found[0] and not session.is_usable():
        raise ended
    return found


def _restart_cause(error: BaseException) -> str | None:
    if isinstance(error, HangError):
        return HANG
    return error.cause if isinstance(error, (WorkerFailedError, EngineError)) else None


OWNER_INTERVAL = 1.0
"""Seconds between two looks at an owner that cannot be watched."""


def _watch_owner(fd: int, owner: dict[str, Any] | None, inbox: Inbox) -> None:
    """Cancels the run when the process at the other end of the pipe wants that, or has exited, in whatever way.

    Args:
        fd: The pipe. A child that the owner has forked may hold its other end, too, and for longer.
        owner: The process, as `this_process` describes it.
        inbox: The driver's.
    """
    watched = None if owner is None else pidfd_of(owner)

    def watch() -> None:
        sources = [fd] if watched is None else [fd, watched]
        while not select.select(sources, [], [], OWNER_INTERVAL if watched is None else None)[0]:
            if owner and is_gone(owner):
                break
        inbox.interrupt("the process that called run() has exited")

    threading.Thread(target=watch, name="rankzero-owner", daemon=True).start()


def main() -> None:
    """Entry point of the detached driver."""
    parser = argparse.ArgumentParser(prog="python -m rankzero.driver.main", description=__doc__)
    parser.add_argument("run_directory")
    parser.add_argument("--submission", type=int, required=True, help="which submission of the run to drive")
    parser.add_argument("--owner", type=int, help="file descriptor of a pipe; what comes there cancels the run")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    drive(RunDirectory(arguments.run_directory), arguments.submission, lambda: json.load(sys.stdin), arguments.owner)


def drive(
    run: RunDirectory,
    submission: int,
    read_private: Callable[[], Mapping[str, Any]],
    owner: int | None = None,
    *,
    replaceable: bool = False,
) -> NoReturn:
    """Drives a submission, as the only one, and ends this process.

    Args:
        run: The run.
        submission: Which one.
        read_private: Gives `Request.private`.
        owner: File descriptor of the owner's pipe; None for a run with a lease.
        replaceable: Another process is started with the same arguments unless this one exits with 0. Then a signal
            ends this one alone, and not the run.
    """
    from rankzero.engines.specs import engine_from_spec

    if run.job().submission < submission:
        # See `StatusWriter`.
        run.restore(submission)
    job = run.job()
    if job.submission != submission:
        sys.exit(f"{run.directory} was submitted again before this driver started")
    start = succession.first(job) if replaceable else None
    if not run.claim_driver(job.submission):
        if not replaceable:
            sys.exit(f"{run.directory} has a driver already")
        start = succession.take_place(run, job)
        if start is None:
            sys.exit()
    allow_open_files()
    private = read_private()
    engine = engine_from_spec(job.engine, private["engine"])
    trackers = private.get("trackers")
    # Where the modules of their classes are.
    sys.path += [entry for entry in (trackers or {}).get("path", ()) if entry not in sys.path]
    driver = Driver(run, engine, private["env"], leased=owner is None, start=start, trackers=trackers)

    def on_signal(number: int, _: object) -> None:
        if replaceable:
            os._exit(_SIGNALLED + number)
        driver.inbox.interrupt(f"the driver got {signal.Signals(number).name}")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, on_signal)
    if owner is not None:
        _watch_owner(owner, job.owner, driver.inbox)
    code = 1
    try:
        driver.run()
        code = int(driver.superseded)
    except BaseException:
        logger.exception("the outcome of the run could not be written")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if not driver.left_nothing:
            descendants.kill_all()
        # Nothing that a JVM or a stuck thread does may hold a driver whose run has ended.
        os._exit(code)
