"""`Delegation`: a stage of Spark Connect whose task 0 runs the driver of the run."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from rankzero import bounds, store
from rankzero.channel.connection import new_secret
from rankzero.driver.driver import Driver
from rankzero.driver.places import cancel_late
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

    def __init__(self, own: Submission, private: Mapping[str, Any], driver: Driver) -> None:
        """Prepares the object without opening a session. ``driver`` is that of this process."""
        self._own = own
        self._private = private
        self._watch = driver.watch
        self._recorder = driver.recorder
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
        refused: Exception | bool = False
        try:
            await self._start(time.monotonic() + self._own.job.start_timeout)
        except Exception as error:
            refused = error
        must_claim = refused or not await self._asked(self._own.has_driver)
        # The first claim counts: that of this process, or of the driver in the stage.
        if not (must_claim and await self._asked(self._own.claim_driver)):
            await self._follow()
            return True
        if self._group:
            await done_within(bounds.STOP_MARGIN(), self._group.cancel)
        await self._places.close()
        if not refused:
            why = str(self._explained()).splitlines()[0]
            self._recorder.announce("engine", f"the run is driven from this host, not in its stage: {why}")
        return refused

    async def _asked(self, action: Callable[[], bool]) -> bool:
        return await reply_of(self._store.submit(action), bounds.STORE_OUTAGE())

    async def _start(self, deadline: float) -> None:
        """Starts the stage, and returns when its driver has claimed the submission or the stage has ended."""
        own, job, env, began = self._own, self._own.job, self._private["env"], time.monotonic()
        session = cast("ConnectSession", await self._places.open(deadline))
        num_tasks = await self._places.reserve(session, deadline)
        stage = {
            "directory": own.run.directory,
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

        self._group = await self._places.request(start, deadline, if_late=cancel_late)
        while not self._ended:
            if await self._watch.inbox.reply_of(self._store.submit(own.has_driver), self._watch.check):
                return
            if (now := time.monotonic()) > deadline:
                raise StartTimeoutError(
                    f"the stage of {num_tasks} tasks did not start within start_timeout={job.start_timeout} s: "
                    f"{session.place} may have fewer free slots; free some, or give more time",
                    missing=[f"task {task}" for task in range(num_tasks)],
                )
            what = f"waiting for {session.place} to begin {num_tasks} tasks, for {now - began:.0f} s"
            self._recorder.note_waiting(what)
            await self._watch.inbox.wait(bounds.POLL_INTERVAL)

    async def _follow(self) -> None:
        """Keeps the connection until the stage has ended; this process may exit before that."""
        if not self._group:
            return
        logger.info("the run is driven in its stage; this process keeps the connection to %s", self._own.job.engine)
        self._group.tolerate_outage()
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
            if self._watch.inbox.interrupted:
                logger.info("this process exits (%s), and the stage continues", self._watch.inbox.interrupted)
                return
            await self._watch.inbox.wait(bounds.POLL_INTERVAL)
        logger.info("the stage has ended, with the driver of the run in it: %s", self._explained())

    def _on_end(self, error: BaseException | None) -> None:
        self._ended = error or RuntimeError("the stage ended before the run did")
        self._watch.inbox.wake()

    def _explained(self) -> RankZeroError:
        assert self._group
        return self._group.explain(self._ended or RuntimeError("the stage ended before the run did"))
