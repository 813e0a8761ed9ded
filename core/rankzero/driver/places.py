"""`Places`: the engine session that the attempts of a run share, and the slots of each attempt.

A cluster may take minutes to reply, or never reply. So each request to it runs in a thread, and a cancel ends the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from rankzero import bounds, store
from rankzero.data.manifest import FILE, from_bytes, to_bytes
from rankzero.driver.recorder import Recorder
from rankzero.driver.watch import Watch
from rankzero.engines.base import Engine, EngineSession, words_of
from rankzero.errors import LOST, EngineError, RankZeroError, RunCancelledError, StartTimeoutError
from rankzero.job import Job
from rankzero.run.directory import Submission
from rankzero.threads import ActionThread, done_within, in_thread, reply_of
from rankzero.values.formats import digest_of

logger = logging.getLogger(__name__)

SESSION_CLOSE_TIMEOUT = bounds.stretched(10.0)  # For an engine session to close (a SparkContext to stop)
REPLY_TIMEOUT = bounds.stretched(2.0)  # For the engine's reply to a request that is made as start_timeout ends
GROWTH_TIMEOUT = bounds.scaled(30.0)  # Most seconds without a new slot until an elastic attempt starts

T = TypeVar("T")


class Places:
    """Holds the engine session of a run, one at a time, and makes requests to it.

    Attributes:
        own: The submission, whose attempts share this object.
        env: The user's environment for the ranks.
        recorder: Writes what happens.
        watch: Knows what ends the run from outside.
        session: The open session, if there is one.
        left_nothing: False if a session did not close, so a JVM that was stopped may still exist.
    """

    def __init__(
        self, engine: Engine, own: Submission, env: Mapping[str, str], recorder: Recorder, watch: Watch
    ) -> None:
        """Prepares the object without opening a session."""
        self._engine = engine
        self.own, self.env, self.recorder, self.watch = own, env, recorder, watch
        self._thread = ActionThread()
        self.session: EngineSession | None = None
        self._url: str | None = None
        self.left_nothing = True

    async def open(self, deadline: float) -> EngineSession:
        """Returns the run's session, which is opened now if there is none. Raises as `request`."""
        if self.session:
            return self.session

        def open_it() -> EngineSession:
            session = self._engine.open(self.own.job, self.env)
            # A missing link must not fail a run.
            with contextlib.suppress(Exception):
                self._url = session.url
            return session

        session = self.session = await self.request(open_it, deadline, lambda late: in_thread(late.close))
        for note in session.notes:
            self.recorder.announce("engine", note)
        if self._url:
            self.recorder.update(engine_url=self._url)
        return session

    async def request(
        self, action: Callable[[], T], deadline: float | None, if_late: Callable[[T], object] = lambda _: None
    ) -> T:
        """Returns the engine's reply to a request, unless the run must end before.

        Args:
            action: The request, which a thread makes.
            deadline: Monotonic time at which the wait ends; None for a request that reports its own progress.
            if_late: Called with the reply if it arrives after the wait has ended, such as to cancel what has started.

        Raises:
            RankZeroError: the engine failed or has not replied in time, or the run must end.
        """
        began, job = time.monotonic(), self.own.job
        # The engine's reply is a better reason for an error than that it has not replied yet.
        limit = math.inf if deadline is None else max(deadline, began + REPLY_TIMEOUT())
        name = job.engine.get("master") or job.engine.get("server") or job.engine.get("kind")
        reply = self._thread.submit(action)

        def check() -> None:
            self.watch.check()
            now = time.monotonic()
            if deadline and now - began > bounds.WAITING_INTERVAL():
                self.recorder.note_waiting(f"waiting for the engine {name} to answer, for {now - began:.0f} s")
            if now > limit:
                what = f"the engine {name} did not answer within start_timeout={job.start_timeout} s"
                raise StartTimeoutError(what, missing=["engine"])

        try:
            return await self.watch.reply_of(reply, check)
        except BaseException as error:
            if reply.done() and reply.exception() is error and not isinstance(error, RankZeroError):
                raise EngineError(f"the attempt could not start: {words_of(error)}") from error
            # The request may never return, so later ones do not wait for it.
            self._abandon()
            reply.add_done_callback(lambda late: late.exception() or if_late(late.result()))
            raise

    async def read_tables(self, job: Job, session: EngineSession) -> Job:
        """Computes the tables that ranks read, and returns the job with their locations. That may take long."""
        stopped, ended, loop = threading.Event(), threading.Event(), asyncio.get_running_loop()

        def say(text: str) -> None:
            loop.call_soon_threadsafe(lambda: self.recorder.announce("engine", text))

        def check() -> None:
            if stopped.is_set():
                raise RunCancelledError("the run was cancelled while its datasets were computed")

        def compute() -> Job:
            try:
                return compute_tables(self.own, job, session, say, check)
            finally:
                ended.set()

        try:
            return await self.request(compute, None)
        finally:
            # Stops the engine's work, too, for which it needs the session a little longer.
            stopped.set()
            await done_within(SESSION_CLOSE_TIMEOUT(), functools.partial(ended.wait, SESSION_CLOSE_TIMEOUT()))

    async def reserve(self, session: EngineSession, deadline: float) -> int:
        """Waits until enough slots exist and no more of them appear, and reserves them; returns their number.

        Raises:
            StartTimeoutError: too few exist at the deadline.
            RankZeroError: the engine failed, or the run must end.
        """
        job, began, before = self.own.job, time.monotonic(), -1
        changed, least = began, job.least_tasks
        while True:
            slots, provable = await self.request(functools.partial(_count_slots, session), deadline)
            now = time.monotonic()
            # Slots that exist count more than the most that settings allow.
            most = max(least, min(job.num_tasks, provable or job.num_tasks))
            if slots != before:
                before, changed = slots, now
            waited = job.start_timeout - (deadline - now)
            num_tasks = tasks_to_start(slots, least, most, now - changed, waited, job.start_timeout)
            if num_tasks and await self.request(functools.partial(session.reserve, num_tasks), deadline):
                return num_tasks
            what = waiting_message(session.place, slots, least, most, now - began, job.start_timeout)
            if now > deadline and slots < least:
                missing = [f"task {task}" for task in range(slots, least)]
                raise StartTimeoutError(f"{what}: add what is missing, or lower num_processes", missing=missing)
            self.recorder.note_waiting(what)
            await self.watch.wait(bounds.POLL_INTERVAL)

    async def drop_broken(self) -> None:
        """Closes a session that the next attempt cannot use, or that does not reply, as a JVM that was stopped."""
        if self.session:
            with contextlib.suppress(Exception):
                if await reply_of(self._thread.submit(self.session.is_usable), SESSION_CLOSE_TIMEOUT()):
                    return
            self._abandon()
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


def tasks_to_start(slots: int, least: int, most: int, unchanged: float, waited: float, bound: float) -> int | None:
    """Returns the number of tasks that an attempt starts with now; None to wait for more slots.

    An elastic attempt (``least < most``) waits for ``most`` while new slots appear, then starts with those that exist.
    It waits for half of the bound at most, within which its ranks must have started: they need the rest.

    Args:
        slots: Slots that exist.
        least: The smallest number of tasks with which an attempt starts.
        most: Tasks of the largest world.
        unchanged: Seconds since the number of slots last changed.
        waited: Seconds since the attempt began.
        bound: Seconds within which its ranks must have started.
    """
    may_grow = unchanged < min(GROWTH_TIMEOUT(), bound / 4) and waited < bound / 2
    return None if slots < least or (slots < most and may_grow) else min(slots, most)


def waiting_message(where: str, slots: int, least: int, most: int, waited: float, bound: float) -> str:
    """Returns the message about the slots that an attempt waits for: how many exist, and how many it needs."""
    needs = f"{least}" if least == most else f"{least} to {most}"
    offers = f"it offers {slots} of the {needs} task slots that this run needs at the same time"
    return f"waiting for {where}: {offers}, after {waited:.0f} s of start_timeout={bound:g} s"


def _count_slots(session: EngineSession) -> tuple[int, int | None]:
    """Returns the slots of a session, and the most that it can have.

    Raises:
        EngineError: the session has ended; the run can continue with another one.
    """
    try:
        found = session.slots(), session.most_slots
        if found[0] or session.is_usable():
            return found
    except Exception:
        if session.is_usable():
            raise
    what = f"the SparkContext or its JVM ended while the run waited for the slots of {session.place}"
    raise EngineError(what, cause=LOST)


def remove_computed(job: Job) -> None:
    """Removes the rows that were computed for a training that has succeeded, since no attempt reads them again."""
    try:
        manifests = from_bytes(store.read_bytes(job.files[FILE]["location"])) if FILE in job.files else {}
        for manifest in manifests.values():
            if manifest.folder:
                store.remove(manifest.folder)
    except Exception as error:
        # The run has succeeded nevertheless, and removing its directory removes the rows, too.
        logger.warning("the rows of run %s were not removed: %s", job.run_id, error)


def compute_tables(
    own: Submission, job: Job, session: EngineSession, say: Callable[[str], None], check: Callable[[], None]
) -> Job:
    """Computes the tables and queries of a job; a resumed training gets the rows with which it began.

    Returns:
        The job with their locations.

    Raises:
        InvalidJobError: a table does not exist, has too few rows, or has a column that cannot become a tensor.
        EngineError: the engine failed.
        RunCancelledError: by ``check``, which the engine calls often.
    """
    known = from_bytes(store.read_bytes(job.files[FILE]["location"])) if FILE in job.files else {}
    # Drivers of earlier submissions have computed them, or an earlier driver of this one.
    for place in [*own.earlier(), own.directory]:
        with contextlib.suppress(FileNotFoundError):
            computed = from_bytes(store.read_bytes(store.join(place, FILE)))
            names = [name for name in computed if name in job.queries]
            known |= {name: computed[name] for name in names if store.exists(computed[name].files[0].location)}
    for name, query in job.queries.items():
        if name not in known:
            known[name] = session.read_table(query, own.new_dataset(name), name, say, check)
            known[name].check_rows(name, job.num_processes)
    data, location = to_bytes(known), own.path(FILE)
    store.write_bytes(location, data, durable=True)
    described = {"location": location, "size": len(data), "absolute": False, "digest": digest_of([data])}
    return replace(job, files={**job.files, FILE: described}, queries={})
