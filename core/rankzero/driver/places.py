"""`Places`: the engine session that the attempts of a run share, and the slots of each attempt.

A cluster may take minutes to reply, or never reply. So each request to it runs in a thread, and a cancel ends the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

from rankzero import bounds
from rankzero.driver import policy
from rankzero.driver.recorder import Recorder
from rankzero.driver.tables import Tables
from rankzero.driver.watch import Inbox
from rankzero.engines.base import AgentGroup, Engine, EngineSession, words_of
from rankzero.errors import LOST, EngineError, RankZeroError, StartTimeoutError
from rankzero.job import Job
from rankzero.run.directory import Submission
from rankzero.threads import ActionThread, done_within, in_thread, reply_of

SESSION_CLOSE_TIMEOUT = bounds.stretched(10.0)  # For an engine session to close (a SparkContext to stop)
SLOTS_TIMEOUT = bounds.stretched(2.0)  # To wait for slots that are asked for as start_timeout ends
T = TypeVar("T")
GroupT = TypeVar("GroupT", bound=AgentGroup)


def cancel_late(reply: Future[GroupT]) -> None:
    """Cancels agents that the engine has started after `Places.request` gave up: its ``if_late`` for a launch."""
    if not reply.exception():
        reply.result().cancel()


class Places:
    """Holds the engine session of a run, one at a time, and makes requests to it."""

    def __init__(
        self, engine: Engine, own: Submission, recorder: Recorder, inbox: Inbox, check: Callable[[], None]
    ) -> None:
        """Prepares the object without opening a session.

        Args:
            engine: The engine to open.
            own: The submission.
            recorder: Receives lines about what the run waits for.
            inbox: The driver's inbox, which each reply wakes.
            check: Raises the typed error if the run must end.
        """
        self._engine = engine
        self._own = own
        self._recorder = recorder
        self._inbox = inbox
        self._check = check
        self._thread = ActionThread()
        self.session: EngineSession | None = None
        self.left_nothing = True
        """False if a session did not close, so a JVM that was stopped may still exist."""

    async def open(self, job: Job, env: Mapping[str, str], deadline: float) -> EngineSession:
        """Returns the run's session, which is opened now if there is none.

        Args:
            job: The job.
            env: The user's environment for the ranks.
            deadline: Monotonic time by which every rank must have started.

        Raises:
            RankZeroError: the engine refuses the job or does not reply in time, or the run must end.
        """
        if self.session:
            return self.session

        def open_it() -> tuple[EngineSession, str | None]:
            self._engine.start_ahead(job, env)
            session = self._engine.open(job)
            # A missing link must not fail a run.
            with contextlib.suppress(Exception):
                return session, session.url
            return session, None

        def close_late(reply: Future[tuple[EngineSession, str | None]]) -> None:
            if not reply.exception():
                in_thread(reply.result()[0].close)

        session, url = await self.request(open_it, job, deadline, if_late=close_late)
        self.session = session
        for note in session.notes:
            self._recorder.announce("engine", note)
        if url:
            self._recorder.update(engine_url=url)
        return session

    async def request(
        self,
        action: Callable[[], T],
        job: Job,
        deadline: float | None,
        *,
        if_late: Callable[[Future[T]], None] | None = None,
    ) -> T:
        """Returns the engine's reply to a request, unless the run must end before.

        Args:
            action: The request, which a thread makes.
            job: The job, for the words of an error.
            deadline: Monotonic time at which the wait ends; None for a request that reports its own progress.
            if_late: Called with the reply if it arrives after the wait has ended.

        Raises:
            RankZeroError: the engine failed or has not replied in time, or the run must end.
        """
        began = time.monotonic()
        say_at, bound = began + bounds.WAITING_INTERVAL(), job.start_timeout
        name = job.engine.get("master") or job.engine.get("server") or job.engine.get("kind")
        reply = self._thread.submit(functools.partial(_with_typed_error, action))

        def check() -> None:
            nonlocal say_at
            self._check()
            now = time.monotonic()
            if deadline is not None and now > say_at:
                say_at = now + bounds.WAITING_INTERVAL()
                what = f"waiting for the engine {name} to answer, for {now - began:.0f} s"
                self._recorder.announce("waiting", what)
            if deadline is not None and now > deadline and not reply.done():
                what = f"the engine {name} did not answer within start_timeout={bound} s"
                raise StartTimeoutError(what, missing=["engine"])

        try:
            return await self._inbox.reply_of(reply, check)
        except BaseException:
            # The request may never return, so later ones do not wait for it.
            self._abandon()
            if if_late:
                reply.add_done_callback(if_late)
            raise

    async def read_tables(self, job: Job, session: EngineSession) -> Job:
        """Computes the tables that ranks read, without a deadline, since that may take longer than any start.

        Returns:
            The job, with the locations of the tables.
        """
        tables, loop = Tables(self._own, job, session), asyncio.get_running_loop()

        def say(text: str) -> None:
            loop.call_soon_threadsafe(lambda: self._recorder.announce("engine", text))

        try:
            return await self.request(functools.partial(tables.read, say), job, None)
        except BaseException:
            # Stops the engine's work, too.
            await done_within(SESSION_CLOSE_TIMEOUT(), lambda: tables.stop(SESSION_CLOSE_TIMEOUT()))
            raise

    async def reserve(self, job: Job, session: EngineSession, deadline: float) -> int:
        """Waits until enough slots exist and no more of them appear, and reserves them; returns their number.

        Raises:
            StartTimeoutError: too few exist at the deadline.
            RankZeroError: the engine failed, or the run must end.
        """
        began = changed = time.monotonic()
        say_at, before, least = began + bounds.WAITING_INTERVAL(), -1, job.least_tasks
        while True:
            # The engine's reply is a better reason for an error than that it has not replied yet.
            limit = max(deadline, time.monotonic() + SLOTS_TIMEOUT())
            slots, provable = await self.request(functools.partial(_count_slots, session), job, limit)
            now = time.monotonic()
            # Slots that exist count more than the most that settings allow.
            most = max(least, min(job.num_tasks, provable or job.num_tasks))
            if slots != before:
                before, changed = slots, now
            waited = job.start_timeout - (deadline - now)
            num_tasks = policy.place(slots, least, most, now - changed, waited, job.start_timeout)
            if num_tasks and await self.request(functools.partial(session.reserve, num_tasks), job, limit):
                return num_tasks
            what = policy.waiting_message(session.place, slots, least, most, now - began, job.start_timeout)
            if now > deadline and slots < least:
                missing = [f"task {task}" for task in range(slots, least)]
                raise StartTimeoutError(f"{what}: add what is missing, or lower num_processes", missing=missing)
            if now > say_at:
                say_at = now + bounds.WAITING_INTERVAL()
                self._recorder.announce("waiting", what)
            await self._inbox.wait(bounds.POLL_INTERVAL)
            self._check()

    async def drop_broken(self) -> None:
        """Closes a session that the next attempt cannot use, or that does not reply, as a JVM that was stopped."""
        if session := self.session:
            reply = self._thread.submit(session.is_usable)
            try:
                is_usable = await reply_of(reply, SESSION_CLOSE_TIMEOUT())
            except Exception:
                self._abandon()
                is_usable = False
            if not is_usable:
                await self.close()

    async def close(self) -> None:
        """Closes the session, if there is one."""
        session, self.session = self.session, None
        if session:
            self.left_nothing = await done_within(SESSION_CLOSE_TIMEOUT(), session.close, self._thread)
        self._abandon()

    def _abandon(self) -> None:
        self._thread.end()
        self._thread = ActionThread()


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
