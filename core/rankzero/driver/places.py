"""`Places`: the engine session that the attempts of a run share, and the states in which an attempt gets its slots.

A cluster may take minutes to reply, or never reply. So each request to it runs in a thread, and a cancel ends the wait.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import math
import queue
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rankzero import bounds
from rankzero.driver import policy
from rankzero.driver.recorder import Recorder
from rankzero.driver.states import State
from rankzero.driver.tables import Tables
from rankzero.driver.watch import Inbox
from rankzero.engines.base import ActionThread, Engine, EngineSession, in_thread, within, words_of
from rankzero.errors import LOST, EngineError, RankZeroError, StartTimeoutError
from rankzero.job import Job
from rankzero.run.directory import Submission

SLOTS_TIMEOUT = bounds.stretched(2.0)  # To wait for slots that are asked for as start_timeout ends
T = TypeVar("T")


class Places:
    """Holds the engine session of a run, one at a time, and makes requests to it."""

    def __init__(self, engine: Engine, inbox: Inbox) -> None:
        """Prepares the object without opening a session.

        Args:
            engine: The engine to open.
            inbox: The driver's inbox, which each reply wakes.
        """
        self._engine = engine
        self._inbox = inbox
        self._thread = ActionThread()
        self.session: EngineSession | None = None
        self.left_nothing = True
        """False if a session did not close, so a JVM that was stopped may still exist."""

    def open(self, job: Job, env: Mapping[str, str]) -> tuple[EngineSession, str | None]:
        """Opens a session; returns it with the URL of its user interface, or None if it has none."""
        self._engine.start_ahead(job, env)
        session, url = self._engine.open(job), None
        # A missing link must not fail a run.
        with contextlib.suppress(Exception):
            url = session.url
        return session, url

    def request(self, action: Callable[[], T]) -> Future[T]:
        """Runs an action in the engine's thread. The future gets its result, or an error that is a RankZeroError."""
        reply = self._thread.submit(functools.partial(_with_typed_error, action))
        reply.add_done_callback(self._inbox.wake)
        return reply

    def abandon(self) -> None:
        """Makes later requests independent of an earlier one that may never return."""
        self._thread.end()
        self._thread = ActionThread()

    def is_broken(self) -> bool:
        """Returns True if the session is unusable, or does not reply, as a JVM that was stopped."""
        if self.session is None:
            return False
        reply = self._thread.submit(self.session.is_usable)
        if not wait([reply], bounds.SESSION_CLOSE_TIMEOUT()).done:
            self.abandon()
            return True
        return reply.exception() is not None or not reply.result()

    def close(self) -> None:
        """Closes the session, if there is one."""
        session, self.session = self.session, None
        if session:
            self.left_nothing = within(bounds.SESSION_CLOSE_TIMEOUT(), session.close, self._thread)
        self.abandon()


@dataclass(frozen=True)
class Plan:
    """The conditions under which an attempt gets its slots.

    Attributes:
        check: Raises the typed error if the run must end.
        env: The user's environment for the ranks.
        deadline: Monotonic time by which every rank must have started.
    """

    own: Submission
    job: Job
    places: Places
    recorder: Recorder
    check: Callable[[], None]
    env: Mapping[str, str]
    deadline: float

    def state(self) -> State:
        """Returns the state in which the attempt begins, or continues once the session is open."""
        if self.places.session is None:
            return Opening(self)
        kind = Reading if self.job.queries else WaitingForSlots
        return kind(self, self.places.session)


class _Asking(State):
    """A state that waits for a reply of the engine."""

    phase = "opening"

    def __init__(self, plan: Plan, question: Callable[[], Any], deadline: float) -> None:
        self._plan = plan
        self._question = question
        self._deadline = self._answer_by = deadline
        self._ask()

    def _ask(self) -> None:
        self._asked_at = time.monotonic()
        # A question without a deadline reports its own progress.
        self._report_at = math.inf if self._deadline == math.inf else self._asked_at + bounds.WAITING_INTERVAL()
        self._reply = self._plan.places.request(self._question)

    @abc.abstractmethod
    def on_reply(self, reply: Any, now: float) -> State:
        """Returns the next state."""

    def tick(self, now: float) -> State:
        """Ends the wait with the reply, the error of a run that must end, or at the deadline."""
        if self._reply.done():
            return self.on_reply(self._reply.result(), now)
        self._plan.check()
        spec, bound = self._plan.job.engine, self._plan.job.start_timeout
        engine = spec.get("master") or spec.get("server") or spec.get("kind")
        if now > self._report_at:
            self._report_at = now + bounds.WAITING_INTERVAL()
            waited = f"{now - self._asked_at:.0f} s"
            self._plan.recorder.announce("waiting", f"waiting for the engine {engine} to answer, for {waited}")
        if now > self._answer_by:
            what = f"the engine {engine} did not answer within start_timeout={bound} s"
            raise StartTimeoutError(what, missing=["engine"])
        return self

    def fail(self, error: BaseException) -> State:
        """Raises the error, and no longer uses the thread of a request that may never return."""
        self._plan.places.abandon()
        raise error


class Opening(_Asking):
    """The engine opens a session."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, functools.partial(plan.places.open, plan.job, plan.env), plan.deadline)

    def fail(self, error: BaseException) -> State:
        """Closes the session if it opens later, too."""
        self._reply.add_done_callback(self._close_late)
        return super().fail(error)

    def _close_late(self, reply: Future[Any]) -> None:
        if not reply.exception() and (session := reply.result()[0]) is not self._plan.places.session:
            in_thread(session.close)

    def on_reply(self, reply: Any, now: float) -> State:
        """Keeps the session for this attempt and later ones."""
        session, url = reply
        self._plan.places.session = session
        for note in session.notes:
            self._plan.recorder.announce("engine", note)
        if url:
            self._plan.recorder.update(engine_url=url)
        return self._plan.state()


class Reading(_Asking):
    """The engine computes the tables that ranks read, without a deadline, since it may take longer than any start."""

    def __init__(self, plan: Plan, session: EngineSession) -> None:
        self._session = session
        self._tables = Tables(plan.own, plan.job, session)
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        super().__init__(plan, functools.partial(self._tables.read, self._said.put), math.inf)

    def tick(self, now: float) -> State:
        """Reports the progress so far."""
        while not self._said.empty():
            self._plan.recorder.announce("engine", self._said.get())
        return super().tick(now)

    def on_reply(self, reply: Any, now: float) -> State:
        """Continues with a job that has the locations of its tables."""
        deadline = now + self._plan.job.start_timeout
        return WaitingForSlots(replace(self._plan, job=reply, deadline=deadline), self._session)

    def fail(self, error: BaseException) -> State:
        """Stops the engine's work, too."""
        self._tables.stop(bounds.SESSION_CLOSE_TIMEOUT())
        return super().fail(error)


class WaitingForSlots(_Asking):
    """The attempt polls the number of slots until they suffice, or until no more of them appear."""

    phase = "waiting for slots"

    def __init__(self, plan: Plan, session: EngineSession) -> None:
        self._session = session
        self._began = self._changed = time.monotonic()
        self._say_at, self._before, self._ask_at = self._began + bounds.WAITING_INTERVAL(), -1, math.inf
        super().__init__(plan, functools.partial(_count_slots, session), plan.deadline)

    def tick(self, now: float) -> State:
        """Polls again after a pause."""
        if self._ask_at == math.inf:
            return super().tick(now)
        self._plan.check()
        if now >= self._ask_at:
            self._ask_at = math.inf
            self._ask()
            # What the engine says is a better reason than that it has not said it yet.
            self._answer_by = max(self._deadline, now + SLOTS_TIMEOUT())
        return self

    def on_reply(self, reply: Any, now: float) -> State:
        """Decides whether the attempt starts with the slots that exist."""
        job, session, least = self._plan.job, self._session, self._plan.job.least_tasks
        slots, provable = reply
        # Slots that exist count more than the most that settings allow.
        most = max(least, min(job.num_tasks, provable or job.num_tasks))
        if slots != self._before:
            self._before, self._changed = slots, now
        waited = job.start_timeout - (self._deadline - now)
        num_tasks = policy.place(slots, least, most, now - self._changed, waited, job.start_timeout)
        if num_tasks and session.reserve(num_tasks):
            return Placed(self._plan, session, num_tasks)
        what = policy.waiting_message(session.place, slots, least, most, now - self._began, job.start_timeout)
        if now > self._deadline and slots < least:
            missing = [f"task {task}" for task in range(slots, least)]
            raise StartTimeoutError(f"{what}: add what is missing, or lower num_processes", missing=missing)
        if now > self._say_at:
            self._say_at = now + bounds.WAITING_INTERVAL()
            self._plan.recorder.announce("waiting", what)
        self._ask_at = now + bounds.POLL_INTERVAL
        return self


@dataclass(frozen=True)
class Placed(State):
    """The attempt has its slots, and its agents can start; the job of its plan has the locations of its tables."""

    phase = "starting"

    plan: Plan
    session: EngineSession
    num_tasks: int


def _with_typed_error(action: Callable[[], T]) -> T:
    try:
        return action()
    except RankZeroError:
        raise
    except BaseException as error:
        raise EngineError(f"the engine could not be opened: {words_of(error)}") from error


def _count_slots(session: EngineSession) -> tuple[int, int | None]:
    """Returns the slots of a session, and the most that it can have.

    Raises:
        EngineError: the session has ended; the run can continue with another one.
    """
    ended = EngineError(
        f"the SparkContext or its JVM ended while the run waited for the slots of {session.place}", cause=LOST
    )
    try:
        found = session.slots(), session.most_slots
    except Exception as error:
        if session.is_usable():
            raise
        raise ended from error
    if not found[0] and not session.is_usable():
        raise ended
    return found
