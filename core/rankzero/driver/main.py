"""The driver as a process: its arguments, its signals, its owner and its exit code.

`rankzero.submit.durable` starts the detached form. Its input is in the run directory, except
secrets, which are in no file: the submitter sends the user's environment and the engine's private configuration as JSON
on standard input. Everything else is `Driver.run`, as in the caller's process. On Spark Connect a `Delegation` may
start a driver within the stage of the run instead.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, cast

from rankzero import bounds, store
from rankzero.bounds import STORE_OUTAGE, STORE_RETRY_INTERVAL
from rankzero.channel.connection import new_secret
from rankzero.driver.driver import Driver
from rankzero.driver.watch import CHECK_INTERVAL
from rankzero.engines.base import Engine
from rankzero.errors import InvalidJobError, RankZeroError, RunNotFoundError, StartTimeoutError
from rankzero.host import processes
from rankzero.host.processes import (
    allow_open_files,
    describe_process,
    is_gone,
    pidfd_of,
    readable,
    settle_signals,
)
from rankzero.run.directory import DRIVER_LOG, RunDirectory, Submission
from rankzero.run.handle import RunHandle
from rankzero.run.observer import CANCEL
from rankzero.task.stage import OVER
from rankzero.threads import done_within, in_thread, reply_of

if TYPE_CHECKING:
    from rankzero.engines.connect.session import ConnectGroup, ConnectSession

logger = logging.getLogger(__name__)

STAGE_END_TIMEOUT = bounds.scaled(5.0)  # For a stage to end after its driver; then it is cancelled
STATUS_TIMEOUT = bounds.scaled(5.0)  # For a status that tells followers which process drives the run
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"  # Format of the lines in a driver's own log


def when_gone(process: dict[str, Any], then: Callable[[], None]) -> None:
    """Calls a function, in a thread, once a process, as `this_process` describes it, has exited."""
    watched = pidfd_of(process)
    sources, interval = ([], bounds.POLL_INTERVAL_LONGEST) if watched is None else ([watched], None)

    def watch() -> None:
        try:
            while not is_gone(process) and not readable(sources, interval):
                pass
        finally:
            # Also if the process cannot be watched any more: a run without its owner must not train on.
            then()

    threading.Thread(target=watch, name="rankzero-owner", daemon=True).start()


def _arguments() -> argparse.Namespace:
    """Returns the arguments of this process: the run directory, and the submission to drive."""
    parser = argparse.ArgumentParser(prog="python -m rankzero.driver.main", description=__doc__)
    parser.add_argument("run_directory")
    parser.add_argument("--submission", type=int, required=True, help="which submission of the run to drive")
    parser.add_argument("--private", help="on a cluster, where secrets are: env: or conf:NAME")
    settle_signals()
    return parser.parse_args()


def main() -> None:
    """Entry point of the detached driver."""
    arguments = _arguments()
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    drive(RunDirectory(arguments.run_directory), arguments.submission, json.load(sys.stdin), is_here=True)


def drive(
    run: RunDirectory,
    submission: int,
    private: Mapping[str, Any],
    engine: Engine | None = None,
    *,
    is_here: bool = False,
) -> NoReturn:
    """Claims a submission, drives it, and exits this process. It may delegate the submission to a driver in its stage.

    Args:
        run: The run.
        submission: Number of the submission.
        private: The result of `Request.private`, with the nonce of the submission.
        engine: The engine of a driver in its stage; None takes the engine of the job.
        is_here: True on the submitter's machine, where the owner of the run can be watched; else it renews a lease.
    """
    # A store that fails for a moment must not end the run.
    job = store.patiently(lambda: run.job_of(submission), STORE_OUTAGE(), STORE_RETRY_INTERVAL(), store.is_missing)
    if job is None or private["nonce"] != job.nonce:
        sys.exit(
            f"{run.directory} on {socket.gethostname()} is not the directory of the run: it was removed, or the store "
            "is neither a path that the submitter and the cluster's hosts share, nor the URL of an object store"
        )
    own = Submission(run, job)
    engine = engine or _engine_of(job.engine, private["engine"])
    os.environ.update(bounds.environment(private["env"]))
    may_delegate = engine.can_host_driver(run, job)
    if not (may_delegate or own.claim_driver(STORE_OUTAGE())):
        sys.exit(f"submission {submission} of {run.directory} has a driver already")
    if own.is_lost():
        sys.exit(f"submission {submission} of {run.directory} ended before this driver started")
    allow_open_files()
    trackers = private.get("trackers")
    # The modules of the trackers' classes are found there.
    sys.path += [entry for entry in (trackers or {}).get("path", ()) if entry not in sys.path]
    owner = job.owner if is_here else None
    driver = Driver(own, engine, private["env"], leased=owner is None, trackers=trackers)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _: driver.watch.interrupt(f"the driver got {signal.Signals(got).name}"))
    signal.signal(CANCEL, lambda *_: driver.watch.cancel())
    if owner is not None:
        when_gone(owner, functools.partial(driver.watch.interrupt, "the process that called run() has exited"))
    elif private.get("retrier"):
        when_gone(private["retrier"], driver.watch.retrier_gone.set)
    code = 1
    try:
        driver.run(Delegation(own, private, driver).run if may_delegate else None)
        code = int(driver.recorder.superseded)
    except BaseException:
        logger.exception("the outcome of the run could not be written")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if not driver.places.left_nothing:
            processes.kill_descendants()
        # A driver whose run has ended must exit even if a JVM or a thread hangs.
        os._exit(code)


class Delegation:
    """A stage whose task 0 runs the driver of the run.

    The process that claims the submission drives the run. Until then this process writes lines about its waiting, and
    one status, which names it. After the driver in the stage has claimed it, it only keeps the connection of the stage.
    """

    def __init__(self, own: Submission, private: Mapping[str, Any], driver: Driver) -> None:
        """Prepares the object without opening a session. ``driver`` is that of this process."""
        self._own, self._private, self._driver, self._watch = own, private, driver, driver.watch
        self._group: ConnectGroup | None = None
        self._ended: BaseException | None = None

    async def run(self) -> Exception | bool:
        """Starts the stage and follows it until it has ended. Raises errors of the store: then nothing may be written.

        Returns:
            True if the driver in the stage had the run. Else this process has claimed it and must drive it: False if
            the stage failed before its driver had claimed it, or the error that prevented its start.
        """
        refused: Exception | bool = False
        try:
            await self._start(time.monotonic() + self._own.job.start_timeout)
        except Exception as error:
            refused = error

        def claim() -> bool:
            # The first claim counts: that of this process, or of the driver in the stage.
            return bool(refused or not self._own.has_driver()) and self._own.claim_driver()

        if not await reply_of(in_thread(claim), bounds.STORE_OUTAGE()):
            await self._follow()
            return True
        if self._group:
            await done_within(bounds.STOP_MARGIN(), self._group.cancel)
        await self._driver.places.close()
        if not refused:
            why = str(self._explained()).splitlines()[0]
            self._driver.recorder.announce("engine", f"the run is driven from this host, not in its stage: {why}")
        return refused

    async def _start(self, deadline: float) -> None:
        """Starts the stage, and returns when its driver has claimed the submission or the stage has ended."""
        own, job, places, recorder = self._own, self._own.job, self._driver.places, self._driver.recorder
        waiting = replace(recorder.status, heartbeat=time.time(), queue_time=job.queue_time)

        def tell() -> None:
            # Before there is another driver, so that followers notice the death of this process. It only informs them.
            with contextlib.suppress(Exception):
                store.patiently(lambda: own.write_status(waiting), STATUS_TIMEOUT(), STORE_RETRY_INTERVAL())

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * STATUS_TIMEOUT()):
                await self._watch.reply_of(in_thread(tell), self._watch.check)
        session, began = cast("ConnectSession", await places.open(deadline)), time.monotonic()
        num_tasks = await places.reserve(session, deadline)
        stage = {
            "directory": own.run.directory,
            "nonce": job.nonce,
            "submission": job.submission,
            "folder": own.path("stage"),
            "secret": new_secret(),
            "num_tasks": num_tasks,
            "place": session.place,
            "encrypts": session.encrypts if job.encrypt is None else job.encrypt,
            "trackers": self._private["trackers"],
        }

        def start() -> ConnectGroup:
            store.make_directory(stage["folder"])
            config = {"env": self._private["env"], "use_gpu": job.use_gpu, "stage": stage}
            return session.host_driver(num_tasks, config, self._on_end)

        def has_begun() -> bool:
            if own.has_driver():
                return True
            # The heartbeats of a driver notice this, but this process writes none.
            recorder.superseded = own.is_lost()
            return False

        self._group = await places.request(start, deadline, lambda late: late.cancel())
        while not self._ended and not await self._watch.reply_of(in_thread(has_begun), self._watch.check):
            if (now := time.monotonic()) > deadline:
                raise StartTimeoutError(
                    f"the stage of {num_tasks} tasks did not start within start_timeout={job.start_timeout} s: "
                    f"{session.place} may have fewer free slots; free some, or give more time",
                    missing=[f"task {task}" for task in range(num_tasks)],
                )
            recorder.note_waiting(f"waiting for {session.place} to begin {num_tasks} tasks, for {now - began:.0f} s")
            await self._watch.wait(bounds.POLL_INTERVAL)

    async def _follow(self) -> None:
        """Keeps the connection until the stage has ended, or soon after its driver; this process may exit before."""
        if not self._group:
            return
        logger.info("the run is driven in its stage; this process keeps the connection to %s", self._own.job.engine)

        own, session, is_named = self._own, self._driver.places.session, threading.Event()
        reader = RunHandle[Any](own.run.directory, job=own.job, follows=False)

        def await_end() -> None:
            # Until its driver has exited, or the run was removed.
            while not self._ended and not store.exists(store.join(own.path("stage"), OVER)) and own.has_driver():
                if (status := reader.status()).state != "pending":
                    is_named.set()
                if status.final and not (session and session.is_usable()):
                    # Its driver may have died with the server, for which pyspark would wait.
                    break
                time.sleep(CHECK_INTERVAL)
            time.sleep(STAGE_END_TIMEOUT())

        # In a thread: the store may hang, while the stage continues.
        over, exit_by = in_thread(await_end), math.inf
        while not (self._ended or over.done()):
            if self._watch.interrupted:
                # Until the first status of its driver, followers take this process for it.
                exit_by = min(exit_by, time.monotonic() + STATUS_TIMEOUT())
                if is_named.is_set() or time.monotonic() >= exit_by:
                    break
            await self._watch.wait(CHECK_INTERVAL)
        if over.done() and not self._ended:
            over.result()
            await done_within(bounds.STOP_MARGIN(), self._group.cancel)
            return
        logger.info("the stage %s", self._explained() if self._ended else f"continues: {self._watch.interrupted}")

    def _on_end(self, error: BaseException | None) -> None:
        self._ended = error or RuntimeError("the stage ended before the run did")
        self._watch.wake()

    def _explained(self) -> RankZeroError:
        assert self._group
        return self._group.explain(self._ended or RuntimeError("the stage ended before the run did"))


def _engine_of(spec: dict[str, Any], private: dict[str, Any]) -> Engine:
    """Returns the engine that `Engine.to_spec` described. Raises InvalidJobError for an unknown kind."""
    if spec["kind"] == "local":
        from rankzero.engines.local import LocalEngine

        return LocalEngine()
    if spec["kind"] == "spark":
        from rankzero.engines.spark.engine import SparkEngine

        return SparkEngine(master=spec["master"], conf=private["conf"])
    if spec["kind"] == "spark-connect":
        from rankzero.engines.connect.engine import SparkConnectEngine

        return SparkConnectEngine(private["url"])
    raise InvalidJobError(f"unknown engine {spec['kind']!r} in the job")


def main_in_stage() -> None:
    """Entry point of a driver beside the agent of task 0 of its stage, so that the run needs no client any more.

    `rankzero.task.stage` starts it with one line of JSON on its standard input, whose end of file ends this process.
    """
    from rankzero.engines.connect.stage import StageEngine

    settle_signals()
    # A stopped process does not read the end of its standard input.
    processes.end_with_parent(os.getppid())
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    stage = json.loads(sys.stdin.buffer.readline())

    def end_with_task() -> None:
        # The next submission of the run continues it.
        readable([sys.stdin.fileno()], None)
        os._exit(1)

    threading.Thread(target=end_with_task, name="rankzero-task", daemon=True).start()
    run = RunDirectory(stage["directory"])
    engine = StageEngine(
        stage["folder"], stage["num_tasks"], stage["host"], stage["secret"], stage["place"], stage["encrypts"]
    )
    # If no driver can listen here, the stage fails before the run is claimed, and the submitter drives the run.
    if job := run.job_of(stage["submission"]):
        engine.check(job)
    drive(run, stage["submission"], stage, engine=engine)


def main_on_cluster() -> None:
    """Entry point of a driver that a Spark cluster starts as the program of an application, below the driver's JVM.

    Its session is the session of that application: pyspark finds the JVM by the environment variables of this process.
    `rankzero.engines.spark.submit` makes its arguments.
    """
    from rankzero.engines.spark.submit import read_private

    arguments = _arguments()
    parent = describe_process(os.getppid())
    private = read_private(arguments.private)
    run = RunDirectory(arguments.run_directory)
    log: list[logging.Handler] = [logging.StreamHandler()]
    if not run.is_remote and (job := run.job_of(arguments.submission)):
        log.append(logging.FileHandler(Submission(run, job).path(DRIVER_LOG)))
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, handlers=log)
    # A cluster that kills an application kills the JVM, not this process.
    when_gone(parent, functools.partial(os.kill, os.getpid(), signal.SIGTERM))
    try:
        drive(run, arguments.submission, private)
    except RunNotFoundError as error:
        sys.exit(str(error))
