"""Delegates a submitted run to a driver in its own stage on Spark Connect, from the process of the submitter."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from rankzero import bounds, store
from rankzero.channel.auth import new_secret
from rankzero.driver.places import Placed, Places, Plan
from rankzero.driver.recorder import Recorder
from rankzero.driver.states import follow
from rankzero.driver.watch import Inbox, Watch
from rankzero.engines.base import Engine, within
from rankzero.errors import RankZeroError, StartTimeoutError
from rankzero.job import Job
from rankzero.masking import Mask, secrets_of
from rankzero.run.directory import RunDirectory
from rankzero.task.stage import OVER

if TYPE_CHECKING:
    from rankzero.engines.connect.session import ConnectGroup, ConnectSession

logger = logging.getLogger(__name__)


class Delegation:
    """A stage whose task 0 runs the driver of the run.

    The process that claims the submission drives the run. Until then this process writes lines about its waiting, and
    no status. After the driver in the stage has claimed it, this process only keeps the connection of the stage.
    """

    def __init__(self, run: RunDirectory, job: Job, engine: Engine, private: Mapping[str, Any], inbox: Inbox) -> None:
        """Prepares the object without opening a session.

        Args:
            run: The run.
            job: Its job.
            engine: The engine of a stage that may run the driver.
            private: The result of `Request.private`.
            inbox: Reports that this process must exit.
        """
        self._run = run
        self._job = job
        self._private = private
        self._inbox = inbox
        self._recorder = Recorder(
            run,
            job.submission,
            job.first_attempt,
            Mask(secrets_of(private["env"])),
            metrics=job.metrics,
            trace_id=job.trace_id,
        )
        self._watch = Watch(run, job, self._recorder, inbox, leased=True)
        self._places = Places(engine, inbox)
        self._folder = run.submission_path(job.submission, "stage")
        self._group: ConnectGroup | None = None
        self.has_claimed = False
        """True once this process has claimed the submission, and must drive the run."""
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> bool:
        """Starts the stage and follows it until it has ended.

        Returns:
            True if the driver in the stage had the run. False if the stage failed before that driver had claimed the
            submission: this process has claimed it then, and must drive the run.

        Raises:
            Exception: the run was cancelled or could not start, if this process `has_claimed` the submission. Else the
                store failed, and this process must not write.
        """
        try:
            self._start(time.monotonic() + self._job.start_timeout)
        except Exception:
            if self._claim():
                raise
        if not self._run.has_driver(self._job.submission) and self._claim():
            assert self._group
            why = str(self._explain(self._group)).splitlines()[0]
            self._recorder.announce("engine", f"the run is driven from this host, not in its stage: {why}")
            return False
        self._follow()
        return True

    def _claim(self) -> bool:
        """Claims the submission and ends the stage; returns False if the driver in the stage has claimed it."""
        self.has_claimed = self._run.claim_driver(self._job.submission)
        if not self.has_claimed:
            return False
        if self._group:
            within(bounds.STOP_MARGIN, self._group.cancel)
        self._places.close()
        return True

    def _start(self, deadline: float) -> None:
        """Starts the stage, and returns when its driver has claimed the submission or the stage has ended."""
        job, env, began = self._job, self._private["env"], time.monotonic()
        plan = Plan(self._run, job, self._places, self._recorder, self._watch.check, env, frozenset(), deadline)
        placed = follow(plan.state(), Placed, self._inbox.renew(), self._recorder)
        session, num_tasks = cast("ConnectSession", placed.session), placed.placement.num_tasks
        store.make_directory(self._folder)
        stage = {
            "directory": self._run.directory,
            "token": self._run.token(),
            "submission": job.submission,
            "folder": self._folder,
            "secret": new_secret(),
            "num_tasks": num_tasks,
            "place": session.place,
            "encrypts": job.encrypts(by_default=session.encrypts),
            "trackers": self._private["trackers"],
        }
        config = {"env": env, "use_gpu": job.use_gpu, "stage": stage}
        self._group = session.host_driver(num_tasks, config, self._on_end)
        say_at = began + bounds.WAITING_INTERVAL
        while not (self._run.has_driver(job.submission) or self._ended.wait(bounds.TICK)):
            self._watch.check()
            now = time.monotonic()
            if now > deadline:
                raise StartTimeoutError(
                    f"the stage of {num_tasks} tasks did not start within start_timeout={job.start_timeout} s: "
                    f"{session.place} may have fewer free slots; free some, or give more time",
                    missing=[f"task {task}" for task in range(num_tasks)],
                )
            if now > say_at:
                say_at = now + bounds.WAITING_INTERVAL
                what = f"waiting for {session.place} to begin {num_tasks} tasks, for {now - began:.0f} s"
                self._recorder.announce("waiting", what)

    def _follow(self) -> None:
        """Keeps the connection until the stage has ended; this process may exit before that."""
        if not self._group:
            return
        logger.info("the run is driven in its stage; this process keeps the connection to %s", self._job.engine)
        self._group.tolerate_outage()
        over_at = math.inf
        while not self._ended.wait(bounds.TICK):
            if over_at == math.inf and store.exists(store.join(self._folder, OVER)):
                over_at = time.monotonic()
            if time.monotonic() - over_at > bounds.STAGE_END_TIMEOUT:
                within(bounds.STOP_MARGIN, self._group.cancel)
                return
            if self._inbox.interrupted:
                logger.info("this process exits (%s), and the stage continues", self._inbox.interrupted)
                return
        if self._error:
            logger.warning("the stage has ended, with the driver of the run in it: %s", self._explain(self._group))

    def _on_end(self, error: BaseException | None) -> None:
        self._error = error
        self._ended.set()

    def _explain(self, group: ConnectGroup) -> RankZeroError:
        return group.explain(self._error or RuntimeError("the stage ended before the run did"))
