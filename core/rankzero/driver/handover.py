"""`Handover`: delegates a run to a driver inside its own stage, and follows it from the submitting process."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, TypeVar

from rankzero import store
from rankzero.bounds import STORE_OUTAGE
from rankzero.channel.auth import new_secret
from rankzero.driver import policy
from rankzero.driver.policy import Placement, Restarts
from rankzero.driver.recorder import Recorder
from rankzero.driver.watch import TICK, Inbox, Watch
from rankzero.engines.base import AgentGroup, EngineSession, within
from rankzero.errors import LOST, EngineError, RankZeroError, RunNotFoundError, StartTimeoutError
from rankzero.job import Job
from rankzero.run.directory import RunDirectory, RunStatus
from rankzero.task import staged

logger = logging.getLogger(__name__)

T = TypeVar("T")

STAGE_END_TIMEOUT = 2.0
"""Seconds for a stage whose run has ended to end, too, so that a Spark Connect server can forget its operation."""

HEARTBEAT_TIMEOUT = 5.0
"""Seconds without a heartbeat from the driver in the stage until the engine is asked whether the stage still runs.

Together with `ANSWER_TIMEOUT` less than `DRIVER_DEAD_AFTER`, after which followers of the run give the driver up."""

MISSED = 1.5
"""Heartbeats that must be missing until then, where the driver writes seldom."""

ANSWER_TIMEOUT = 5.0
"""Seconds for the engine to answer whether the stage still runs."""

STORE_ANSWER_TIMEOUT = 20.0
"""Seconds for an object store to answer before it counts as unreachable."""

RETRY_INTERVAL = 1.0
"""Seconds between two requests to a store that fails."""


class DrivenElsewhere(Exception):
    """The run has another driver, or had one until it ended: this process has nothing more to write."""


class Unseen(Exception):
    """The executors do not see the run directory, so this process drives the run."""


class Handover:
    """A stage with the driver of its run inside. `run` follows it until it has ended, then raises its outcome."""

    def __init__(
        self,
        run: RunDirectory,
        job: Job,
        number: int,
        recorder: Recorder,
        session: EngineSession,
        placement: Placement,
        inbox: Inbox,
        watch: Watch,
    ) -> None:
        self._run = run
        self._job = job
        self._number = number
        self._recorder = recorder
        self._session = session
        self._num_tasks = placement.num_tasks + placement.spare
        self._inbox = inbox
        self._ended: Future[BaseException | None] = Future()
        self._watch = watch
        self._folder = run.submission_path(job.submission, f"stage-{number}")
        self.is_delegated = False
        """True once the driver in the stage writes the run directory."""
        self._query_thread: threading.Thread | None = None
        self._is_out = False
        self._engine_reports = True
        """False once the engine can no longer report the end of the stage."""

    def run(
        self, deadline: float, env: dict[str, str], budget: Restarts, trackers: Mapping[str, Any] | None = None
    ) -> None:
        """Starts the stage, gives up the run directory, and follows the stage.

        Raises:
            DrivenElsewhere: the run has ended in the stage, or this process was asked to exit and leaves the stage
                running.
            Unseen: the stage has ended because an executor does not see the run directory, or cannot run a driver.
            EngineError: the stage was lost, and the driver with it.
            RankZeroError: the run was cancelled, or could not start in time.
        """
        store.make_directory(self._folder)
        stage = {
            "directory": self._run.directory,
            "token": self._run.token(),
            "folder": self._folder,
            "relays": self._run.is_remote,
            **({} if self._run.is_remote else {"tasks": self._folder}),
            "secret": new_secret(),
            "num_tasks": self._num_tasks,
            "place": self._session.place,
            "encrypts": self._job.encrypts(by_default=self._session.encrypts),
            "ports": self._job.ports,
            "first_attempt": self._number,
            "budget": asdict(budget),
            "trackers": trackers,
        }
        config = {**policy.agent_config(self._job, self._number, env, self._job.start_timeout), "stage": stage}
        group = self._session.launch(self._num_tasks, config, self._on_end)
        try:
            self._await_driver(group, deadline)
            self._let_go()
            group.tolerate_outage()
            self._follow(group)
        except DrivenElsewhere:
            raise
        except BaseException:
            within(policy.STOP_MARGIN, group.cancel)
            group.wait(policy.STOP_MARGIN)
            raise

    def _on_end(self, error: BaseException | None) -> None:
        self._ended.set_result(error)
        self._inbox.wake()

    def _await_driver(self, group: AgentGroup, deadline: float) -> None:
        """Waits for the driver in the stage, which starts when Spark has slots for it."""
        began, say_at = time.monotonic(), time.monotonic() + policy.WAITING_INTERVAL
        while not self._has(staged.READY):
            self._watch.check()
            is_slow = self._run.is_remote and time.monotonic() - began > staged.SLOW_AFTER
            self._poll_end(group, RETRY_INTERVAL if is_slow else staged.poll_interval(self._folder))
            now = time.monotonic()
            if now > deadline:
                names = self._query_until_answered(lambda: store.list_names(self._folder)) or []
                if staged.READY in names:
                    # The driver had started, and only the store was unreachable.
                    return
                missing = [f"task {task}" for task in range(self._num_tasks)]
                raise StartTimeoutError(
                    f"the stage of {self._num_tasks} tasks did not start within start_timeout="
                    f"{self._job.start_timeout} s: {self._session.place} may have fewer free slots; free "
                    "some, or give more time",
                    missing=missing,
                )
            if now > say_at:
                say_at = now + policy.WAITING_INTERVAL
                what = f"waiting for {self._session.place} to begin {self._num_tasks} tasks, for {now - began:.0f} s"
                self._recorder.announce("waiting", what)

    def _let_go(self) -> None:
        self._recorder.let_go()
        self.is_delegated = True
        # During an outage the driver in the stage claims the run without this file, after a time-out.
        self._query_until_answered(lambda: store.create(store.join(self._folder, staged.GO), b"submitter"))
        logger.info("the run is driven in its stage from now on; this process only follows it")

    def _follow(self, group: AgentGroup) -> None:
        exit_at, poll_at, beat, beat_at = math.inf, 0.0, 0.0, time.monotonic()
        while time.monotonic() < exit_at:
            if self._inbox.interrupted:
                logger.info("this process exits (%s), and the stage continues", self._inbox.interrupted)
                raise DrivenElsewhere
            self._poll_end(group, TICK)
            now = time.monotonic()
            if now < poll_at:
                continue
            status = self._query(self._read_status)
            poll_at = now + (status.interval if status else RETRY_INTERVAL)
            if status is None:
                if now - beat_at > STORE_OUTAGE:
                    break
            elif beat != status.heartbeat:
                beat, beat_at = status.heartbeat, now
            elif status.final and exit_at == math.inf and self._has(staged.OVER):
                exit_at = now + STAGE_END_TIMEOUT
            elif now - beat_at > max(HEARTBEAT_TIMEOUT, MISSED * status.interval) and not self._engine_answers():
                if status.certain:
                    break
                raise EngineError(
                    f"the stage was lost, with the driver of the run in it: neither it nor {self._session.place} "
                    "answers any more",
                    cause=LOST,
                )
        raise DrivenElsewhere

    def _has(self, name: str) -> bool:
        """Returns True if the folder has such a file; False also while the store cannot be read."""
        return name in (self._query(lambda: store.list_names(self._folder)) or ())

    def _query(self, question: Callable[[], T]) -> T | None:
        """Returns the result of one query of the store, or None if it fails; a process that must exit does not wait.

        Raises:
            RunNotFoundError: the run was removed.
        """
        answers: list[T] = []
        removed: list[RunNotFoundError] = []

        def ask() -> None:
            try:
                answers.append(question())
                self._is_out = False
            except RunNotFoundError as error:
                removed.append(error)
            except Exception as error:
                # Drivers of object stores raise exceptions of their own types. One warning for each outage.
                if not self._is_out:
                    logger.warning("cannot poll the driver in the stage: %s", error)
                self._is_out = True

        if not self._run.is_remote:
            ask()
        elif self._query_thread is None or not self._query_thread.is_alive():
            self._query_thread = threading.Thread(target=ask, name="rankzero-handover", daemon=True)
            self._query_thread.start()
        give_up = time.monotonic() + STORE_ANSWER_TIMEOUT
        while (
            self._query_thread
            and self._query_thread.is_alive()
            and time.monotonic() < give_up
            and not self._inbox.interrupted
        ):
            self._query_thread.join(staged.POLL_INTERVAL)
        if removed:
            raise removed[0]
        return answers[0] if answers else None

    def _query_until_answered(self, question: Callable[[], T]) -> T | None:
        """Repeats a query of the store until it succeeds; returns None if it fails for `STORE_OUTAGE` seconds.

        Raises:
            DrivenElsewhere: this process must exit.
        """
        give_up = time.monotonic() + STORE_OUTAGE
        while (answer := self._query(question)) is None and time.monotonic() < give_up:
            if self._inbox.interrupted:
                raise DrivenElsewhere
            time.sleep(RETRY_INTERVAL)
        return answer

    def last_status(self) -> RunStatus | None:
        """Returns the last status that the driver in the stage wrote; None if the store fails for `STORE_OUTAGE`
        seconds.
        """
        return self._query_until_answered(self._read_status)

    def _read_status(self) -> RunStatus:
        """Returns the status of the run; restores the final one if a late write of this process has replaced it."""
        status, own = self._run.status(), self._recorder.status
        if (status.driver_host, status.driver_pid) == (own.driver_host, own.driver_pid):
            with contextlib.suppress(FileNotFoundError):
                self._run.put_status_back(store.read_bytes(store.join(self._folder, staged.OVER)))
                return self._run.status()
        return status

    def _engine_answers(self) -> bool:
        """Returns True if the engine can still report the end of the stage."""
        answers: list[bool] = []
        return (
            self._engine_reports
            and within(ANSWER_TIMEOUT, lambda: answers.append(self._session.is_usable()))
            and answers == [True]
        )

    def _poll_end(self, group: AgentGroup, timeout: float) -> None:
        self._inbox.wait(timeout)
        if not self._engine_reports or not self._ended.done():
            return
        error = self._ended.result()
        if self.is_delegated and error and not self._engine_answers():
            self._engine_reports = False
            logger.warning("the engine no longer reports on the stage; its driver is followed by its heartbeat")
            return
        raise self._outcome(group, error)

    def _outcome(self, group: AgentGroup, error: BaseException | None) -> Exception:
        if self.is_delegated and (not (status := self.last_status()) or status.certain):
            # Another process drives the run when the store is back, and not this one.
            return DrivenElsewhere()
        if error is None:
            return EngineError("the stage ended before the run did", cause=LOST)
        if staged.UNSEEN in str(error):
            [why, *_] = (line for line in str(error).splitlines() if staged.UNSEEN in line)
            return Unseen(why[why.index(staged.UNSEEN) :].removeprefix("rankzero: "))
        if self.is_delegated:
            explained = group.explain(error)
            return EngineError(
                f"the stage was lost, with the driver of the run in it: {explained}", cause=_cause(explained)
            )
        return group.explain(error)


def _cause(error: RankZeroError) -> str:
    """Returns the cause of the end of a stage: one that does not end by itself was lost, whatever Spark calls it."""
    return (error.cause if isinstance(error, EngineError) else None) or LOST
