"""The driver as a process: its arguments, its signals, its owner and its exit code.

`rankzero.submit.drivers` starts the detached form. Its input is in the run directory, except
secrets, which are in no file: the submitter sends the user's environment and the engine's private configuration as JSON
on standard input. Everything else is `Driver.run`, as in the caller's process. On Spark Connect a `Delegation` may
start a driver within the stage of the run instead.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from rankzero import bounds, store
from rankzero.bounds import STORE_OUTAGE, STORE_RETRY_INTERVAL
from rankzero.driver.delegation import Delegation
from rankzero.driver.driver import Driver
from rankzero.engines.base import Engine
from rankzero.errors import InvalidJobError, RunNotFoundError
from rankzero.host import processes
from rankzero.host.processes import (
    allow_open_files,
    is_gone,
    pidfd_of,
    process_namespace,
    process_start,
    readable,
    settle_signals,
)
from rankzero.run.directory import RunDirectory, Submission
from rankzero.run.names import DRIVER_LOG
from rankzero.run.observer import CANCEL

logger = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"  # Format of the lines in a driver's own log


def when_gone(process: dict[str, Any] | None, then: Callable[[], None], *pipes: int) -> None:
    """Calls a function, in a thread, once a process has exited, which `this_process` describes.

    Input or the end of file of one of the pipes counts, too. Of a pipe alone, a child that the process has forked may
    keep the other end open for longer.
    """
    watched = None if process is None else pidfd_of(process)
    sources, interval = ([*pipes], bounds.POLL_INTERVAL_LONGEST) if watched is None else ([*pipes, watched], None)

    def watch() -> None:
        try:
            while not (process and is_gone(process)) and not readable(sources, interval):
                pass
        finally:
            # Also if the process cannot be watched any more: a run without its owner must not train on.
            then()

    threading.Thread(target=watch, name="rankzero-owner", daemon=True).start()


def _arguments(what: str | None, *options: tuple[str, dict[str, Any]]) -> argparse.Namespace:
    """Returns the arguments of this process: the run directory, the submission to drive, and these options."""
    parser = argparse.ArgumentParser(prog="python -m rankzero.driver.main", description=what)
    parser.add_argument("run_directory")
    parser.add_argument("--submission", type=int, required=True, help="which submission of the run to drive")
    for name, settings in options:
        parser.add_argument(name, **settings)
    settle_signals()
    return parser.parse_args()


def main() -> None:
    """Entry point of the detached driver."""
    owner = {"type": int, "help": "file descriptor of a pipe; input or end of file there cancels the run"}
    arguments = _arguments(__doc__, ("--owner", owner))
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    drive(RunDirectory(arguments.run_directory), arguments.submission, json.load(sys.stdin), arguments.owner)


def drive(
    run: RunDirectory,
    submission: int,
    private: Mapping[str, Any],
    owner: int | None = None,
    engine: Engine | None = None,
) -> NoReturn:
    """Claims a submission, drives it, and exits this process. It may delegate the submission to a driver in its stage.

    Args:
        run: The run.
        submission: Number of the submission.
        private: The result of `Request.private`, with the nonce of the submission.
        owner: File descriptor of the owner's pipe; None for a run with a lease.
        engine: The engine of a driver in its stage; None takes the engine of the job.
    """
    # A store that fails for a moment must not end the run.
    job = store.patiently(lambda: run.job_of(submission), STORE_OUTAGE(), STORE_RETRY_INTERVAL(), store.is_missing)
    if job is None or private["nonce"] != job.nonce:
        sys.exit(f"{run.directory} was removed before this driver started")
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
    driver = Driver(own, engine, private["env"], leased=owner is None, trackers=trackers)

    def on_signal(number: int, _: object) -> None:
        driver.inbox.interrupt(f"the driver got {signal.Signals(number).name}")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, on_signal)
    signal.signal(CANCEL, lambda *_: driver.inbox.cancel())
    if owner is not None:
        exited = "the process that called run() has exited"
        when_gone(job.owner, functools.partial(driver.inbox.interrupt, exited), owner)
    elif private.get("retrier"):
        when_gone(private["retrier"], driver.inbox.retrier_gone.set)
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
    processes.signal_on_parent_death(signal.SIGKILL)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    stage = json.loads(sys.stdin.buffer.readline())
    # The next submission of the run continues it.
    when_gone(None, lambda: os._exit(1), sys.stdin.fileno())
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

    arguments = _arguments(__doc__, ("--private", {"required": True, "help": "where secrets are: env: or conf:NAME"}))
    parent = {"pid": os.getppid(), "start": process_start(os.getppid()), "namespace": process_namespace()}
    private = read_private(arguments.private)
    run = RunDirectory(arguments.run_directory)
    job = run.job_of(arguments.submission)
    if job is None or job.nonce != private["nonce"]:
        sys.exit(
            f"{run.directory} on {socket.gethostname()} is not the directory of the run: the store must be a path that "
            "the submitter and the cluster's hosts share, or the URL of an object store"
        )
    log: list[logging.Handler] = [logging.StreamHandler()]
    if not run.is_remote:
        log.append(logging.FileHandler(Submission(run, job).path(DRIVER_LOG)))
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, handlers=log)
    # A cluster that kills an application kills the JVM, not this process.
    when_gone(parent, functools.partial(os.kill, os.getpid(), signal.SIGTERM))
    try:
        drive(run, arguments.submission, private)
    except RunNotFoundError as error:
        sys.exit(str(error))
