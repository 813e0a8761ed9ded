"""`Driver`: makes the attempts of a run and writes its outcome, in the caller's process or in its own."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import wait
from typing import Any

from rankzero import bounds, store
from rankzero.driver import ending
from rankzero.driver.attempt import Attempt
from rankzero.driver.ending import Verdict
from rankzero.driver.launched import Final, Starting
from rankzero.driver.places import Placed, Places, Plan
from rankzero.driver.policy import FAILURES_OF_A_BAD_HOST, Restarts
from rankzero.driver.recorder import Recorder
from rankzero.driver.states import follow
from rankzero.driver.tables import remove_computed
from rankzero.driver.trackers import Trackers
from rankzero.driver.watch import Inbox, Watch
from rankzero.engines.base import ActionThread, Engine, Flag
from rankzero.errors import (
    HANG,
    EngineError,
    HangError,
    RankZeroError,
    RunCancelledError,
    RunTimeoutError,
    WorkerFailedError,
)
from rankzero.host.processes import allow_open_files
from rankzero.masking import Mask, secrets_of
from rankzero.run.directory import Submission
from rankzero.run.handle import RunHandle
from rankzero.run.names import REPORT_FILE

logger = logging.getLogger(__name__)

MANY_AGENTS = 256
"""Number of agents above which the driver raises the limit of open files of its process, which may be the caller's."""


class Driver:
    """Runs one submission of a run to its end and writes the outcome into the run directory.

    Attributes:
        inbox: Receives what ends the run from outside.
        recorder: Writes the lines of this submission, also while its stage is started.
        places: The engine's session, which may leave a JVM behind.
    """

    def __init__(
        self,
        own: Submission,
        engine: Engine,
        env: dict[str, str],
        *,
        leased: bool = False,
        trackers: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepares a driver without reading or writing the run directory.

        Args:
            own: The submission to drive.
            engine: The engine that places the agents.
            env: The user's environment for the ranks.
            leased: True if the run outlives its caller, and cancels itself when no process follows it
                (`Job.orphan_timeout`).
            trackers: The result of `rankzero.submit.pack.pack_trackers`, or None.
        """
        self._own = own
        self._job = own.job
        self._env = env
        self._number = self._job.first_attempt
        self._budget = Restarts(self._job.max_restarts, self._job.max_preemptions)
        self.inbox = Inbox()
        secrets = secrets_of(env) + secrets_of(engine.to_spec()[1].get("conf", {}))
        self.recorder = Recorder(own, Mask(secrets))
        self._watch = Watch(own, self.recorder, self.inbox, leased=leased, note_cancelling=self._note_cancelling)
        self._trackers = Trackers(own, trackers)
        self.places = Places(engine, self.inbox)
        self._started_at: float | None = None

    def run(self, refused: Exception | None = None) -> None:
        """Runs the submission until it has ended. A failed run does not raise: its status reports the failure.

        Args:
            refused: An error that counts as the end of the first attempt: a Spark stage should have run this driver in
                one of its tasks, and failed before.

        Raises:
            ResultError: the store does not take the outcome.
        """
        self.recorder.note_thread()
        if self._job.submission:
            # The page of the submission before.
            self._watch.thread.submit(functools.partial(store.remove, self._own.run.path(REPORT_FILE)))
        self._trackers.start()
        try:
            self._run_to_its_end(refused)
        finally:
            self._trackers.close()
            if not self.recorder.superseded:
                write_report(self._own, self._watch.thread)
            self._watch.thread.end()

    def _run_to_its_end(self, refused: Exception | None) -> None:
        try:
            verdict = self._attempt_until_done(refused)
        except RunCancelledError as error:
            self.recorder.finish(state="cancelled", error=error.to_json())
        except RankZeroError as error:
            self.recorder.finish(state="failed", error=error.to_json())
        except BaseException as error:
            logger.exception("the driver failed")
            what = EngineError(f"the driver failed: {type(error).__name__}: {error}")
            self.recorder.finish(state="failed", error=what.to_json())
        else:
            assert verdict.success is not None
            result, value = verdict.success
            # The end is recorded, so no submission resumes from here and reads these rows.
            if self.recorder.is_success:
                remove_computed(self._job)
            self.recorder.finish(state="succeeded", result=result.to_json(), value=value)
        finally:
            self._trackers.end()
            # After the final status, so callers do not wait while a SparkContext stops, which takes a second.
            self.places.close()

    def _attempt_until_done(self, refused: Exception | None) -> Verdict:
        """Makes attempts until one succeeds; raises the error of the last one when no further attempt is allowed."""
        failures, last = Counter[str](), None
        try:
            while True:
                try:
                    verdict = Verdict(error=refused) if refused else self._attempt()
                except BaseException as error:
                    verdict = Verdict(error=error)
                if verdict.error is None:
                    return verdict
                after = self._budget.after(_restart_cause(verdict.error))
                if after is None:
                    raise verdict.error
                before, last = last, verdict.lost_by and (verdict.lost_by, self.recorder.status.checkpoint)
                if last and last == before:
                    assert isinstance(verdict.error, RankZeroError)
                    raise ending.repeats(verdict.error)
                (self._budget, pause), refused = after, None
                self._number += 1
                if (host := verdict.blamed) is not None:
                    failures[host] += 1
                    if failures[host] == FAILURES_OF_A_BAD_HOST:
                        what = f"{host} made {failures[host]} attempts fail: take it out of the cluster"
                        self.recorder.announce("bad-host", what, host=host)
                self._prepare_restart(verdict.error, pause)
        except BaseException:
            # Processes that an attempt left behind end with the session, so it closes before the run has ended.
            self.places.close()
            raise

    def _attempt(self) -> Verdict:
        """Makes one attempt and returns how it ended."""
        number, recorder, mailbox = self._number, self.recorder, self.inbox.renew()
        recorder.update(state="starting", phase="opening", attempt=number, preemptions=self._budget.preemptions)
        deadline = time.monotonic() + self._job.start_timeout
        plan = Plan(self._own, self._job, self.places, recorder, self._check, self._env, deadline)
        placed = follow(plan.state(), Placed, mailbox, recorder)
        self._job = placed.plan.job
        self._note_placement(number, placed)
        if placed.session.num_agents(placed.num_tasks) > MANY_AGENTS:
            allow_open_files()
        attempt = Attempt(self._own, number, placed, self.recorder, mailbox, self._watch, self._env, self._started_at)
        try:
            if (found := attempt.resume and attempt.resume.id) != recorder.status.checkpoint:
                recorder.update(checkpoint=found)
            if number > self._job.first_attempt:
                begin = f"checkpoint {attempt.resume.id}" if attempt.resume else "the beginning"
                logger.warning("attempt %s begins at %s", number, begin)
            return follow(Starting(attempt), Final, mailbox, self.recorder).verdict
        finally:
            attempt.close()
            if self._started_at is None:
                self._started_at = attempt.started_at

    def _prepare_restart(self, error: BaseException, pause: float) -> None:
        """Records the restart, waits for the pause between two attempts, and closes the session if it is broken."""
        cause, what = _restart_cause(error), str(error).splitlines()[0]
        logger.warning("attempt %s follows in %s s, because %s", self._number, pause, what)
        event = {"type": "restart", "attempt": self._number, "cause": cause, "what": what, "pause": pause}
        self.recorder.event(event)
        end = time.monotonic() + pause
        self._check()
        while (left := end - time.monotonic()) > 0:
            self.inbox.wait(min(left, bounds.TICK))
            self._check()
        if self.places.is_broken():
            self.places.close()

    def _check(self) -> None:
        """Raises the typed error if the run must end while no attempt of it is running."""
        self._watch.check()
        timeout, started_at = self._job.timeout, self._started_at
        if timeout and started_at is not None and time.monotonic() - started_at > timeout:
            raise RunTimeoutError(f"the run took longer than timeout={timeout} s and was ended between two attempts")

    def _note_cancelling(self) -> None:
        """Records that the run is about to be cancelled, so that no other try attaches to it while its ranks stop."""
        # A success stands, whatever the driver is asked for behind it.
        if not (self.recorder.status.cancelling or self.recorder.status.certain):
            self.recorder.update(cancelling=True)

    def _note_placement(self, number: int, placed: Placed) -> None:
        """Records the world size of an attempt if the job alone does not determine it."""
        if self._job.min_processes is not None:
            world_size = self._job.sized(placed.num_tasks).num_processes
            what = f"attempt {number} starts with {world_size} ranks, of {self._job.world}, on {placed.session.place}"
            self.recorder.announce("world", what, attempt=number, world_size=world_size)
            self.recorder.update(world_size=world_size)


def _restart_cause(error: BaseException) -> str | None:
    if isinstance(error, HangError):
        return HANG
    return error.cause if isinstance(error, (WorkerFailedError, EngineError)) else None


class DriverThread(threading.Thread):
    """A driver in a thread of the caller's process. ``error`` has the exception that `Driver.run` raised, if any."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(name="rankzero-driver", daemon=True)
        self.driver = driver
        self.error: BaseException | None = None
        # join() with a timeout and is_alive() are unusable: before CPython 3.13, an exception that a signal handler
        # raises inside join() makes a running thread look finished.
        self._ended = Flag()

    def run(self) -> None:
        """Runs the driver until the run has ended."""
        try:
            self.driver.run()
        except BaseException as error:
            self.error = error
        finally:
            self._ended.set()

    @property
    def pid(self) -> int:
        """The process id of the caller's process."""
        return os.getpid()

    def poll(self) -> int | None:
        """Returns None while the driver runs, then 0, like `subprocess.Popen.poll`."""
        return 0 if self._ended.is_set() else None

    def cancel(self) -> None:
        """Makes the driver end the run on request, without the store."""
        self.driver.inbox.cancel()

    def await_end(self, timeout: float) -> None:
        """Waits until the driver has finished, for at most ``timeout`` seconds."""
        self._ended.wait(timeout)

    def last_output(self) -> bytes:
        """Returns nothing, since the thread prints with the caller's process."""
        return b""


def write_report(own: Submission, thread: ActionThread) -> None:
    """Writes the page of a run that has ended. An error is only logged, and a silent store is not waited for.

    Args:
        own: The submission.
        thread: The thread that writes.
    """

    def write() -> None:
        try:
            # Imported here, since no launch waits for it.
            from rankzero.report import page

            text = page.draw(RunHandle(own.run.directory, job=own.job, follows=False))
            store.write_bytes(own.run.path(REPORT_FILE), text.encode("utf-8", "replace"))
        except Exception as error:
            logger.warning("the report of the run could not be written: %s; `rankzero report` makes it", error)

    timeout = bounds.REPORT_TIMEOUT()
    if not wait([thread.submit(write)], timeout).done:
        logger.warning("the report of the run takes more than %g s; `rankzero report` makes it", timeout)
