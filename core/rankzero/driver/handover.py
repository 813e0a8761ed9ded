"""`Handover`: a stage that has the driver of its run within, as the process sees it that has submitted the stage."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from rankzero import store
from rankzero.bounds import STORE_OUTAGE
from rankzero.channel.auth import new_secret
from rankzero.driver import policy
from rankzero.driver.agents import agent_config
from rankzero.driver.policy import Placement, Restarts
from rankzero.driver.recorder import Recorder
from rankzero.driver.watch import DRIVER, TICK, Inbox, Watch
from rankzero.engines.base import AgentGroup, EngineSession, within
from rankzero.errors import LOST, EngineError, RankZeroError, RunNotFoundError, StartTimeoutError
from rankzero.job import Job
from rankzero.run.directory import RunDirectory, RunStatus
from rankzero.task import staged

logger = logging.getLogger(__name__)

T = TypeVar("T")

END_PATIENCE = 2.0
"""Seconds for a stage whose run has ended to end, too: a server that is told that its client has all keeps nothing."""

SILENCE = 5.0
"""Seconds for which the heartbeat of the driver in the stage stands still until the engine is asked whether it is
there. With the time for its answer less than followers of the run wait (`DRIVER_DEAD_AFTER`), who do not know why."""

MISSED = 1.5
"""Heartbeats that are missed then, where the driver writes seldom."""

ANSWER_TIMEOUT = 5.0
"""Seconds for that answer."""

STORE_ANSWER_TIMEOUT = 20.0
"""Seconds for which an object store is waited for before it counts as one that cannot be read."""

LOOK_AGAIN = 1.0
"""Seconds until a store that failed is asked again."""

_ENDED = "stage-ended"


class DrivenElsewhere(Exception):
    """The run has another driver, or had it until its end: this process has nothing more to write."""


class Unseen(Exception):
    """The executors do not see the run directory, so the run is driven from here."""


class Handover:
    """One stage. `run` follows it to its end, and always raises what came of it."""

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
        self._messages = inbox.renew()
        self._watch = watch
        self._folder = run.submission_path(job.submission, f"stage-{number}")
        self.has_gone = False
        """True if the driver in the stage writes the run directory."""
        self._asker: threading.Thread | None = None
        self._is_out = False
        self._is_heard_of = True
        """False once the engine has lost sight of the stage: its end will not be heard from there."""

    def run(
        self, deadline: float, env: dict[str, str], budget: Restarts, trackers: Mapping[str, Any] | None = None
    ) -> None:
        """Starts the stage, lets go of the run directory, and follows the stage.

        Raises:
            DrivenElsewhere: the run has ended there, or this process shall end and leave the stage to itself.
            Unseen: the stage has ended, since an executor does not see the run directory, or can have no driver.
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
        config = {**agent_config(self._job, self._number, env, self._job.start_timeout), "stage": stage}
        group = self._session.launch(self._num_tasks, config, self._on_end)
        try:
            self._await_driver(group, deadline)
            self._let_go()
            group.hold_on()
            self._follow(group)
        except DrivenElsewhere:
            raise
        except BaseException:
            within(policy.STOP_MARGIN, group.cancel)
            group.wait(policy.STOP_MARGIN)
            raise

    def _on_end(self, error: BaseException | None) -> None:
        self._messages.put((DRIVER, {"type": _ENDED, "error": error}))

    def _await_driver(self, group: AgentGroup, deadline: float) -> None:
        """Waits for the driver in the stage; Spark may wait for slots."""
        began, say_at = time.monotonic(), time.monotonic() + policy.WAITING_INTERVAL
        while not self._has(staged.READY):
            self._watch.check()
            is_slow = self._run.is_remote and time.monotonic() - began > staged.SLOW_AFTER
            self._look_at_end(group, LOOK_AGAIN if is_slow else staged.poll_interval(self._folder))
            now = time.monotonic()
            if now > deadline:
                names = self._answer(lambda: store.list_names(self._folder)) or []
                if staged.READY in names:
                    # It was the way to the store that was out.
                    return
                missing = [f"task {task}" for task in range(self._num_tasks)]
                raise StartTimeoutError(
                    f"the stage of {self._num_tasks} tasks has not begun within start_timeout="
                    f"{self._job.start_timeout} s: {self._session.place} may have fewer free slots; free "
                    "some, or give more time",
                    missing=missing,
                )
            if now > say_at:
                say_at = now + policy.WAITING_INTERVAL
                what = f"waiting for {self._session.place} to begin {self._num_tasks} tasks, for {now - began:.0f} s"
                self._recorder.event({"type": "waiting", "what": what})
                self._recorder.log(0, [f"rankzero: {what}"])

    def _let_go(self) -> None:
        self._recorder.let_go()
        self.has_gone = True
        # At an outage it takes the run without this.
        self._answer(lambda: store.create(store.join(self._folder, staged.GO), b"submitter"))
        logger.info("the run is driven in its stage from now on; this process only follows it")

    def _follow(self, group: AgentGroup) -> None:
        leave_at, look_at, beat, beat_at = math.inf, 0.0, 0.0, time.monotonic()
        while time.monotonic() < leave_at:
            if self._inbox.interrupted:
                logger.info("this process ends (%s), and the stage goes on", self._inbox.interrupted)
                raise DrivenElsewhere
            self._look_at_end(group, TICK)
            now = time.monotonic()
            if now < look_at:
                continue
            status = self._asked(self._read_status)
            look_at = now + (status.interval if status else LOOK_AGAIN)
            if status is None:
                if now - beat_at > STORE_OUTAGE:
                    break
            elif beat != status.heartbeat:
                beat, beat_at = status.heartbeat, now
            elif status.final and leave_at == math.inf and self._has(staged.OVER):
                leave_at = now + END_PATIENCE
            elif now - beat_at > max(SILENCE, MISSED * status.interval) and not self._server_answers():
                if status.certain:
                    break
                raise EngineError(
                    f"the stage was lost, with the driver of the run in it: neither it nor {self._session.place} "
                    "answers any more",
                    cause=LOST,
                )
        raise DrivenElsewhere

    def _has(self, name: str) -> bool:
        """True if there is such a file in the folder; False, too, while the store cannot be asked."""
        return name in (self._asked(lambda: store.list_names(self._folder)) or ())

    def _asked(self, question: Callable[[], T]) -> T | None:
        """What the store answers; None while it does not. A process that shall end waits for no answer.

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
                # Drivers of object stores have exceptions of their own. One line for an outage.
                if not self._is_out:
                    logger.warning("cannot look for the driver in the stage: %s", error)
                self._is_out = True

        if not self._run.is_remote:
            ask()
        elif self._asker is None or not self._asker.is_alive():
            self._asker = threading.Thread(target=ask, name="rankzero-handover", daemon=True)
            self._asker.start()
        give_up = time.monotonic() + STORE_ANSWER_TIMEOUT
        while self._asker and self._asker.is_alive() and time.monotonic() < give_up and not self._inbox.interrupted:
            self._asker.join(staged.POLL_INTERVAL)
        if removed:
            raise removed[0]
        return answers[0] if answers else None

    def _answer(self, question: Callable[[], T]) -> T | None:
        """What the store answers at last; None if it has not for all too long. Who shall end does not wait for it."""
        give_up = time.monotonic() + STORE_OUTAGE
        while (answer := self._asked(question)) is None and time.monotonic() < give_up:
            if self._inbox.interrupted:
                raise DrivenElsewhere
            time.sleep(LOOK_AGAIN)
        return answer

    def last_status(self) -> RunStatus | None:
        """What the driver in the stage has written at last; None if the store cannot be asked for all too long."""
        return self._answer(self._read_status)

    def _read_status(self) -> RunStatus:
        """The run's. A write of this process that came late may have replaced the final one, which is put back."""
        status, own = self._run.status(), self._recorder.status
        if (status.driver_host, status.driver_pid) == (own.driver_host, own.driver_pid):
            with contextlib.suppress(FileNotFoundError):
                self._run.put_status_back(store.read_bytes(store.join(self._folder, staged.OVER)))
                return self._run.status()
        return status

    def _server_answers(self) -> bool:
        """True if what becomes of the stage will be heard from there."""
        answers: list[bool] = []
        return (
            self._is_heard_of
            and within(ANSWER_TIMEOUT, lambda: answers.append(self._session.is_usable()))
            and answers == [True]
        )

    def _look_at_end(self, group: AgentGroup, timeout: float) -> None:
        with contextlib.suppress(queue.Empty):
            _, message = self._messages.get(timeout=timeout)
            if message["type"] == _ENDED:
                if self.has_gone and message["error"] and not self._server_answers():
                    self._is_heard_of = False
                    logger.warning("the stage cannot be asked for any more; its driver is followed by its heartbeat")
                    return
                raise self._outcome(group, message["error"])

    def _outcome(self, group: AgentGroup, error: BaseException | None) -> Exception:
        if self.has_gone and (not (status := self.last_status()) or status.certain):
            # Whoever drives it when the store is back, it is not this process.
            return DrivenElsewhere()
        if error is None:
            return EngineError("the stage ended before the run did", cause=LOST)
        if staged.UNSEEN in str(error):
            [why, *_] = (line for line in str(error).splitlines() if staged.UNSEEN in line)
            return Unseen(why[why.index(staged.UNSEEN) :].removeprefix("rankzero: "))
        if self.has_gone:
            explained = group.explain(error)
            return EngineError(
                f"the stage was lost, with the driver of the run in it: {explained}", cause=_cause(explained)
            )
        return group.explain(error)


def _cause(error: RankZeroError) -> str:
    """A stage that does not end by itself was lost, whatever Spark calls it."""
    return (error.cause if isinstance(error, EngineError) else None) or LOST
