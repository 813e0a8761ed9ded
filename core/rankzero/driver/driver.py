"""`Driver`: makes the attempts of a run and writes its outcome, in the caller's process or in its own."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import logging
import os
import pickle
import queue
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from rankzero import bounds, store
from rankzero.driver.attempt import Attempt
from rankzero.driver.ending import Restarts, Verdict
from rankzero.driver.places import Places, remove_computed
from rankzero.driver.recorder import Recorder
from rankzero.driver.watch import CHECK_INTERVAL, Watch
from rankzero.engines.base import Engine
from rankzero.errors import (
    HANG,
    EngineError,
    HangError,
    RankZeroError,
    RunCancelledError,
)
from rankzero.masking import Mask, secrets_of, without_credentials
from rankzero.run.directory import EVENTS, REPORT_FILE, Submission
from rankzero.run.handle import RunHandle
from rankzero.run.lines import events_of
from rankzero.threads import ActionThread, in_thread, reply_of
from rankzero.tracking.tracker import Tracker

TRACKER_POLL_INTERVAL = 1.0  # Seconds before each poll of the events, the first too: imports slow the ranks' start
FAILURES_OF_A_BAD_HOST = 2  # Failures of one host after which the run's lines name it

logger = logging.getLogger(__name__)


class Driver:
    """Runs one submission of a run to its end and writes the outcome into the run directory.

    Attributes:
        recorder: Writes the lines of this submission, also while its stage is started.
        places: The engine's session, which may leave a JVM behind.
        watch: Knows what ends the run from outside.
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
            leased: True if the run cancels itself when no process follows it (`Job.orphan_timeout`).
            trackers: The result of `rankzero.submit.pack.pack_trackers`, or None.
        """
        self._own, self._job = own, own.job
        secrets = secrets_of(env) + secrets_of(engine.to_spec()[1].get("conf", {}))
        self.recorder = Recorder(own, Mask(secrets))
        self.watch = Watch(own, self.recorder, leased=leased)
        self._has_ended = threading.Event()
        self._feeds = [TrackerFeed(own, pickled, self._has_ended) for pickled in (trackers or {}).get("pickles", ())]
        self.places = Places(engine, own, env, self.recorder, self.watch)

    def run(self, before: Callable[[], Awaitable[Exception | bool]] | None = None) -> None:
        """Runs the submission until it has ended. A failed run does not raise: its status reports the failure.

        Args:
            before: Called in the event loop first. It returns True if the run is driven elsewhere. An error that it
                returns counts as the end of the first attempt.

        Raises:
            ResultError: the store does not take the outcome.
        """

        async def drive() -> None:
            await self.watch.start()
            try:
                refused = await before() if before else False
                if refused is not True:
                    await self._run_to_its_end(refused or None)
            finally:
                self.watch.end()

        # A loop of its own kind, whatever policy the caller has set.
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            runner.run(drive())

    async def _run_to_its_end(self, refused: Exception | None) -> None:
        self.recorder.note_thread()
        for feed in self._feeds:
            feed.start()
        last = ActionThread("rankzero-finish")
        try:
            outcome = await self._outcome(refused)
            # The files may be on a disk that hangs.
            await reply_of(last.submit(functools.partial(self.recorder.finish, **outcome)))
            if "result" in outcome and not self.recorder.superseded:
                # Not awaited yet: a store may hang. But before all else, since the caller's process may exit soon.
                last.submit(functools.partial(remove_computed, self._job))
        finally:
            self._has_ended.set()
            # After the final status, so callers do not wait while a SparkContext stops, which takes a second.
            await self.places.close()
            limit = bounds.TRACKERS_TIMEOUT()
            for joined in [in_thread(functools.partial(feed.join, limit)) for feed in self._feeds]:
                await reply_of(joined)
            for feed in filter(TrackerFeed.is_alive, self._feeds):
                logger.warning("%s has not taken the end of the run within %g s", feed.what, limit)
            if not self.recorder.superseded:
                reported = last.submit(functools.partial(write_report, self._own))
                try:
                    await reply_of(reported, bounds.REPORT_TIMEOUT())
                except Exception as error:
                    why = error if reported.done() else f"it takes more than {bounds.REPORT_TIMEOUT():g} s"
                    logger.warning("the report of the run is not written: %s; `rankzero report` makes it", why)
            last.end()

    async def _outcome(self, refused: Exception | None) -> dict[str, Any]:
        """Returns the fields of the final status."""
        try:
            verdict = await self._attempt_until_done(refused)
            assert verdict.success is not None
            result, value = verdict.success
            return {"state": "succeeded", "result": result.to_json(), "value": value}
        except RankZeroError as error:
            state = "cancelled" if isinstance(error, RunCancelledError) else "failed"
            return {"state": state, "error": error.to_json()}
        except BaseException as error:
            logger.exception("the driver failed")
            what = EngineError(f"the driver failed: {type(error).__name__}: {error}")
            return {"state": "failed", "error": what.to_json()}

    async def _attempt_until_done(self, refused: Exception | None) -> Verdict:
        """Makes attempts until one succeeds; raises the error of the last one when no further attempt is allowed."""
        failures, number = Counter[str](), self._job.first_attempt
        budget = Restarts(self._job.max_restarts, self._job.max_preemptions)
        try:
            while True:
                verdict = Verdict(error=refused) if refused else await self._attempt(number, budget.preemptions)
                if verdict.error is None:
                    return verdict
                cause = HANG if isinstance(verdict.error, HangError) else getattr(verdict.error, "cause", None)
                after = budget.after(cause)
                if after is None:
                    raise verdict.error
                (budget, pause), refused, number = after, None, number + 1
                if (host := verdict.blamed) is not None:
                    failures[host] += 1
                    if failures[host] == FAILURES_OF_A_BAD_HOST:
                        what = f"{host} made {failures[host]} attempts fail: take it out of the cluster"
                        self.recorder.announce("bad-host", what, host=host)
                what = str(verdict.error).splitlines()[0]
                logger.warning("attempt %s follows in %s s, because %s", number, pause, what)
                of_restart = {"attempt": number, "cause": cause, "what": what, "pause": pause}
                self.recorder.event({"type": "restart", **of_restart})
                end = time.monotonic() + pause
                self.watch.check()
                while (left := end - time.monotonic()) > 0:
                    await self.watch.wait(min(left, CHECK_INTERVAL))
                    self.watch.check()
                await self.places.drop_broken()
        except BaseException:
            # Processes that an attempt left behind end with the session, so it closes before the run has ended.
            await self.places.close()
            raise

    async def _attempt(self, number: int, preemptions: int) -> Verdict:
        """Makes one attempt and returns how it ended."""
        self.recorder.update(state="starting", phase="opening", attempt=number, preemptions=preemptions)
        attempt = Attempt(self.places, self._job, number)
        try:
            return await attempt.live()
        except Exception as error:
            return Verdict(error=error)
        finally:
            # Tables are computed once.
            self._job = replace(self._job, files=attempt.job.files, queries=attempt.job.queries)


class DriverThread(threading.Thread):
    """A driver in a thread of the caller's process. ``error`` has the exception that `Driver.run` raised, if any."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(name="rankzero-driver", daemon=True)
        self.driver = driver
        self.error: BaseException | None = None
        # An exception that a signal handler raises may leave a lock held inside Event.wait, and before CPython 3.13 it
        # makes a running thread look finished inside join().
        self._has_ended = False
        self._end: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(self) -> None:
        """Runs the driver until the run has ended."""
        try:
            self.driver.run()
        except BaseException as error:
            self.error = error
        finally:
            self._has_ended = True
            self._end.put(None)

    def poll(self) -> int | None:
        """Returns None while the driver runs, then 0, like `subprocess.Popen.poll`."""
        return 0 if self._has_ended else None

    def cancel(self) -> None:
        """Makes the driver end the run on request, without the store."""
        self.driver.watch.cancel()

    def await_end(self, timeout: float) -> None:
        """Waits until the driver has finished, for at most ``timeout`` seconds."""
        if not self._has_ended:
            with contextlib.suppress(queue.Empty):
                # For the next thread that waits. If an exception prevents it, that thread waits for its whole timeout.
                self._end.put(self._end.get(timeout=max(0.0, timeout)))

    def last_output(self) -> bytes:
        """Returns nothing, since the thread prints with the caller's process."""
        return b""


def write_report(own: Submission) -> None:
    """Writes the page of a run that has ended."""
    # Imported here, since no launch waits for it.
    from rankzero.report import page

    text = page.draw(RunHandle(own.run.directory, job=own.job, follows=False))
    store.write_bytes(own.run.path(REPORT_FILE), text.encode("utf-8", "replace"))


class TrackerFeed(threading.Thread):
    """The thread that calls one tracker of a submission, while this process drives it."""

    def __init__(self, own: Submission, pickled: str, ended: threading.Event) -> None:
        """Prepares the thread. `rankzero.submit.pack.pack_trackers` has pickled the tracker."""
        super().__init__(name="rankzero-tracker", daemon=True)
        self._handle: RunHandle[Any] = RunHandle(own.run.directory, job=own.job, follows=False)
        self._pickled = pickled
        self._stream = self._handle.stream(EVENTS, earlier=False)
        self._ended = ended
        self._tracker: Tracker | None = None
        self._has_begun = False
        self.what = "a tracker"

    def run(self) -> None:
        """Polls the events until the run has ended, and then once more."""
        has_ended = has_warned = False
        while not has_ended:
            has_ended = self._ended.wait(max(TRACKER_POLL_INTERVAL, self._handle.pace))
            try:
                try:
                    self._poll()
                finally:
                    if has_ended and self._has_begun and self._tracker:
                        self._tracker.end(self._handle, self._handle.status())
            except Exception as error:
                if not has_warned:
                    # The error of a library may contain an address with a password, which it found in the environment.
                    mask = Mask(secrets_of(vars(self._tracker) if self._tracker else {}) + secrets_of(os.environ))
                    text = without_credentials(mask.text(f"{type(error).__name__}: {error}"))
                    logger.warning("%s misses events of the run: %s", self.what, text)
                has_warned = True

    def _poll(self) -> None:
        """Passes new events on to the tracker. Raises the tracker's exceptions."""
        tracker = self._tracker
        if tracker is None:
            tracker = self._tracker = pickle.loads(base64.b64decode(self._pickled))
            self.what = type(tracker).__name__
            if tracker.is_idempotent:
                self._stream = self._handle.stream(EVENTS)
        if not self._has_begun:
            tracker.begin(self._handle)
            self._has_begun = True
        status = self._handle.status()
        end = None if status.final else self._stream.end(status)
        while True:
            before, lines, after = self._stream.position, self._stream.read(end), self._stream.position
            self._stream.position = before if tracker.is_idempotent else after
            tracker.add(self._handle, list(events_of(lines)))
            self._stream.position = after
            if not lines:
                return
