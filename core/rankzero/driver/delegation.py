"""`Delegation`: a stage of Spark Connect whose task 0 runs the driver of the run."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from rankzero import bounds, store
from rankzero.channel.connection import new_secret
from rankzero.driver.driver import Driver
from rankzero.driver.places import cancel_late
from rankzero.engines.base import Engine
from rankzero.errors import RankZeroError, StartTimeoutError
from rankzero.run.directory import Submission
from rankzero.task.stage import OVER
from rankzero.threads import ActionThread, done_within, reply_of

if TYPE_CHECKING:
    from rankzero.engines.connect.session import ConnectGroup, ConnectSession

STAGE_END_TIMEOUT = bounds.scaled(5.0)  # For a stage to end after its driver; then it is cancelled

logger = logging.getLogger(__name__)


class Delegation:
    """A stage whose task 0 runs the driver of the run.

    The process that claims the submission drives the run. Until then this process writes lines about its waiting, and
    no status. After the driver in the stage has claimed it, this process only keeps the connection of the stage.
    """

    def __init__(self, own: Submission, engine: Engine, private: Mapping[str, Any], driver: Driver) -> None:
        """Prepares the object without opening a session.

        Args:
            own: The submission.
            engine: The engine of a stage that may run the driver.
            private: The result of `Request.private`.
            driver: The driver of this process. Its inbox reports that this process must exit.
        """
        self._own = own
        self._job = own.job
        self._private = private
        self._inbox = driver.inbox
        self._recorder = driver.recorder
        self._watch = driver.watch
        self._places = driver.places
        self._folder = own.path("stage")
        self._group: ConnectGroup | None = None
        self._ended: BaseException | None = None
        self._store = ActionThread("rankzero-stage")

    async def run(self) -> Exception | bool:
        """Starts the stage and follows it until it has ended.

        Returns:
            True if the driver in the stage had the run. Else this process has claimed the submission, and must drive
            the run: False if the stage failed before its driver had claimed it, or the error that prevented its
            start.

        Raises:
            Exception: the store failed, and this process must not write.
        """
        try:
            await self._start(time.monotonic() + self._job.start_timeout)
        except Exception as error:
            if await self._claim():
                return error
        if not await reply_of(self._store.submit(self._own.has_driver), bounds.STORE_OUTAGE()) and await self._claim():
            assert self._group
            why = str(self._explain(self._group)).splitlines()[0]
            self._recorder.announce("engine", f"the run is driven from this host, not in its stage: {why}")
            return False
        await self._follow()
        return True

    async def _claim(self) -> bool:
        """Claims the submission and ends the stage; returns False if the driver in the stage has claimed it."""
        if not await reply_of(self._store.submit(self._own.claim_driver), bounds.STORE_OUTAGE()):
            return False
        if self._group:
            await done_within(bounds.STOP_MARGIN(), self._group.cancel)
        await self._places.close()
        return True

    async def _start(self, deadline: float) -> None:
        """Starts the stage, and returns when its driver has claimed the submission or the stage has ended."""
        own, job, env, began = self._own, self._job, self._private["env"], time.monotonic()
        session = cast("ConnectSession", await self._places.open(job, env, deadline))
        num_tasks = await self._places.reserve(job, session, deadline)
        stage = {
            "directory": self._own.run.directory,
            "nonce": job.nonce,
            "submission": job.submission,
            "folder": self._folder,
            "secret": new_secret(),
            "num_tasks": num_tasks,
            "place": session.place,
            "encrypts": job.encrypts(by_default=session.encrypts),
            "trackers": self._private["trackers"],
        }

        def start() -> ConnectGroup:
            store.make_directory(self._folder)
            config = {"env": env, "use_gpu": job.use_gpu, "stage": stage}
            return session.host_driver(num_tasks, config, self._on_end)

        self._group = await self._places.request(start, job, deadline, if_late=cancel_late)
        say_at = began + bounds.WAITING_INTERVAL()
        while not self._ended:
            if await self._inbox.reply_of(self._store.submit(own.has_driver), self._watch.check):
                return
            now = time.monotonic()
            if now > deadline:
                raise StartTimeoutError(
                    f"the stage of {num_tasks} tasks did not start within start_timeout={job.start_timeout} s: "
                    f"{session.place} may have fewer free slots; free some, or give more time",
                    missing=[f"task {task}" for task in range(num_tasks)],
                )
            if now > say_at:
                say_at = now + bounds.WAITING_INTERVAL()
                what = f"waiting for {session.place} to begin {num_tasks} tasks, for {now - began:.0f} s"
                self._recorder.announce("waiting", what)
            await self._inbox.wait(bounds.POLL_INTERVAL)

    async def _follow(self) -> None:
        """Keeps the connection until the stage has ended; this process may exit before that."""
        if not self._group:
            return
        logger.info("the run is driven in its stage; this process keeps the connection to %s", self._job.engine)
        over_at = math.inf

        def is_over() -> bool:
            # Or the run was removed meanwhile.
            return store.exists(store.join(self._folder, OVER)) or not self._own.has_driver()

        reply = self._store.submit(is_over)
        while not self._ended:
            # The store may hang, while the stage continues.
            if over_at == math.inf and reply.done():
                over_at, reply = time.monotonic() if reply.result() else math.inf, self._store.submit(is_over)
            if time.monotonic() - over_at > STAGE_END_TIMEOUT():
                await done_within(bounds.STOP_MARGIN(), self._group.cancel)
                return
            if self._inbox.interrupted:
                logger.info("this process exits (%s), and the stage continues", self._inbox.interrupted)
                return
            await self._inbox.wait(bounds.POLL_INTERVAL)
        logger.info("the stage has ended, with the driver of the run in it: %s", self._explain(self._group))

    def _on_end(self, error: BaseException | None) -> None:
        self._ended = error or RuntimeError("the stage ended before the run did")
        self._inbox.wake()

    def _explain(self, group: ConnectGroup) -> RankZeroError:
        return group.explain(self._ended or RuntimeError("the stage ended before the run did"))
