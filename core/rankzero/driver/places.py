"""`Places`: the engine session in which the attempts of a run get their slots.

A cluster may take minutes to answer, or never answer. So each request to it runs in a thread, and a cancel ends the
wait.
"""

from __future__ import annotations

import contextlib
import math
import queue
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from rankzero.driver import policy
from rankzero.driver.policy import Placement
from rankzero.driver.watch import DRIVER, TICK, Inbox, Messages
from rankzero.engines.base import ActionThread, Engine, EngineSession, within, words_of
from rankzero.errors import LOST, EngineError, RankZeroError, StartTimeoutError
from rankzero.job import Job

CLOSE_TIMEOUT = 10.0
"""Seconds for an engine session to close (a SparkContext to stop)."""

SLOTS_INTERVAL = 0.1
"""Seconds between two polls of the number of slots of a cluster."""

_DONE = "engine-done"
_SAY = "engine-says"

T = TypeVar("T")


class Places:
    """Opens engine sessions, one at a time, and waits for their slots."""

    def __init__(
        self,
        engine: Engine,
        job: Job,
        inbox: Inbox,
        check: Callable[[], None],
        say: Callable[[dict[str, Any]], None],
    ) -> None:
        """Prepares the object without opening a session.

        Args:
            engine: The engine to open.
            job: The job of the run.
            inbox: The driver's inbox.
            check: Raises the typed error if the run must end.
            say: Records an event, which followers of the run also see as a line.
        """
        self._engine = engine
        self._job = job
        self._inbox = inbox
        self._check = check
        self._say = say
        self._thread = ActionThread()
        self.session: EngineSession | None = None
        self.left_nothing = True
        """False if a session did not close, so a JVM that was stopped may still exist."""

    def open(self, env: dict[str, str], deadline: float) -> tuple[EngineSession, str | None]:
        """Opens a session; returns it with the URL of its user interface, or None if it has none.

        Args:
            env: The user's environment for the ranks.
            deadline: Monotonic time by which the engine must answer.
        """
        self.session, url = self.in_thread(lambda: self._open(env), deadline)
        for note in self.session.notes:
            self._say({"type": "engine", "what": note})
        return self.session, url

    def _open(self, env: dict[str, str]) -> tuple[EngineSession, str | None]:
        self._engine.start_ahead(self._job, env)
        session, url = self._engine.open(self._job), None
        # A missing link must not fail a run.
        with contextlib.suppress(Exception):
            url = session.url
        return session, url

    def is_broken(self) -> bool:
        """Returns True if the session is unusable or does not answer."""
        session, answers = self.session, list[bool]()
        # A JVM that was stopped does not answer at all.
        return session is not None and not (
            self._within(lambda: answers.append(session.is_usable())) and answers == [True]
        )

    def gather(self, session: EngineSession, deadline: float, bad: frozenset[str]) -> Placement:
        """Waits for the slots of the next attempt.

        Raises:
            StartTimeoutError: there were too few slots at the deadline.
            RunTimeoutError: the run had started, and took longer than its timeout.
            EngineError: the session ended meanwhile.
        """
        job, began = self._job, time.monotonic()
        changed, say_at, before = began, began + policy.WAITING_INTERVAL, -1
        least = job.least_tasks
        while True:
            slots, provable, by_host = self.in_thread(lambda: _count_slots(session, by_host=bool(bad)), deadline)
            # Slots that exist count more than the most that settings allow.
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
            self.pause(SLOTS_INTERVAL)

    def pause(self, seconds: float) -> None:
        """Waits for some seconds, unless a cancel or the run's timeout ends the wait."""
        end = time.monotonic() + seconds
        while True:
            self._check()
            left = end - time.monotonic()
            if left <= 0:
                return
            with contextlib.suppress(queue.Empty):
                self._inbox.queue.get(timeout=min(left, TICK))

    def close(self) -> None:
        """Closes the session, if there is one."""
        session, self.session = self.session, None
        if session:
            self.left_nothing = self._within(session.close)
        self._renew_thread()

    def _within(self, action: Callable[[], None]) -> bool:
        """Runs an engine's action for `CLOSE_TIMEOUT` seconds at most; returns False if it took longer."""
        is_done = within(CLOSE_TIMEOUT, action, self._thread.start)
        if not is_done:
            self._renew_thread()
        return is_done

    def _renew_thread(self) -> None:
        """Makes later actions independent of an earlier one that may never return."""
        self._thread.end()
        self._thread = ActionThread()

    def say_from_thread(self, what: str) -> None:
        """Records an event of the engine, from an action that runs in `in_thread`."""
        self._inbox.queue.put((DRIVER, {"type": _SAY, "what": what}))

    def in_thread(self, action: Callable[[], T], deadline: float) -> T:
        """Runs an engine's action in a thread, so that a cluster that does not answer cannot block the driver."""
        messages = self._inbox.renew()

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

        self._thread.start(act)
        try:
            return cast(T, self._await_done(messages, deadline))
        except BaseException:
            # The action may never return.
            self._renew_thread()
            raise

    def _await_done(self, messages: Messages, deadline: float) -> Any:
        began = time.monotonic()
        # Actions without a deadline report their own progress.
        say_at = math.inf if deadline == math.inf else began + policy.WAITING_INTERVAL
        while True:
            with contextlib.suppress(queue.Empty):
                _, message = messages.get(timeout=TICK)
                if message["type"] == _SAY:
                    self._say({"type": "engine", "what": message["what"]})
                if message["type"] == _DONE:
                    if message["failure"]:
                        raise message["failure"]
                    return message["result"]
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


def _count_slots(session: EngineSession, *, by_host: bool) -> tuple[int, int | None, dict[str, int]]:
    """Returns the slots of a session, the most that it can have, and the slots of each host.

    Raises:
        EngineError: the session has ended; the run can continue with another one.
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
