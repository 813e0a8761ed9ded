"""`Places`: where the attempts of a run are placed, the session of its engine: opened, asked for slots, given up.

A cluster may take minutes for each, or never answer: whatever is asked of it runs in a thread, in reach of a cancel.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from rankzero.driver import policy
from rankzero.driver.policy import Placement
from rankzero.driver.watch import DRIVER, TICK, Inbox
from rankzero.engines.base import Engine, EngineSession, within, words_of
from rankzero.errors import LOST, EngineError, RankZeroError, StartTimeoutError
from rankzero.job import Job

CLOSE_TIMEOUT = 10.0
"""Seconds for an engine session to close (a SparkContext to stop)."""

SLOTS_INTERVAL = 0.1
"""Seconds between two looks at the number of slots of a cluster."""

_DONE = "engine-done"
_SAY = "engine-says"

T = TypeVar("T")


class Places:
    """One session at a time; the next is opened when one was given up."""

    def __init__(
        self,
        engine: Engine,
        job: Job,
        inbox: Inbox,
        check: Callable[[], None],
        say: Callable[[dict[str, Any]], None],
    ) -> None:
        """Opens nothing.

        Args:
            engine: Where.
            job: Of the run.
            inbox: The driver's.
            check: Raises the typed error if the run is to end.
            say: Records an event, for whoever follows the run, too.
        """
        self._engine = engine
        self._job = job
        self._inbox = inbox
        self._check = check
        self._say = say
        self.session: EngineSession | None = None
        self.left_nothing = True
        """False if a session did not close: a JVM that was stopped may still be there."""

    def open(self, env: dict[str, str], deadline: float) -> tuple[EngineSession, str | None]:
        """Opens the session; where it shows itself to people, too.

        Args:
            env: The user's environment for the ranks.
            deadline: Monotonic time by which it must answer.
        """
        self.session, url = self.in_thread(lambda: self._open(env), deadline)
        for note in self.session.notes:
            self._say({"type": "engine", "what": note})
        return self.session, url

    def _open(self, env: dict[str, str]) -> tuple[EngineSession, str | None]:
        self._engine.start_ahead(self._job, env)
        session, url = self._engine.open(self._job), None
        # A link for people is not worth a run.
        with contextlib.suppress(Exception):
            url = session.url
        return session, url

    def is_broken(self) -> bool:
        """True if the session cannot be used any more, or does not say."""
        session, answers = self.session, list[bool]()
        # A JVM that was stopped does not answer at all.
        return session is not None and not (
            within(CLOSE_TIMEOUT, lambda: answers.append(session.is_usable())) and answers == [True]
        )

    def gather(self, session: EngineSession, deadline: float, bad: frozenset[str]) -> Placement:
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
            slots, provable, by_host = self.in_thread(lambda: _look(session, by_host=bool(bad)), deadline)
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
            self.pause(SLOTS_INTERVAL)

    def pause(self, seconds: float) -> None:
        """Waits within the reach of a cancel and of the run's timeout."""
        end = time.monotonic() + seconds
        while True:
            self._check()
            left = end - time.monotonic()
            if left <= 0:
                return
            with contextlib.suppress(queue.Empty):
                self._inbox.queue.get(timeout=min(left, TICK))

    def close(self) -> None:
        """Gives the session up, if there is one."""
        session, self.session = self.session, None
        if session:
            self.left_nothing = within(CLOSE_TIMEOUT, session.close)

    def say_from_thread(self, what: str) -> None:
        """An event of the engine, from an action that runs in `in_thread`."""
        self._inbox.queue.put((DRIVER, {"type": _SAY, "what": what}))

    def in_thread(self, action: Callable[[], T], deadline: float) -> T:
        """Runs an engine's action in a thread, so that a cluster that does not answer cannot hold us."""
        messages = self._inbox.renew()
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
