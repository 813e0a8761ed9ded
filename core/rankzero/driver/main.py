"""The driver as a process: its arguments, its signals, its owner and its exit code.

`rankzero.submit.drivers` starts the detached form. Its input is in the run directory, except
secrets, which are in no file: the submitter sends the user's environment and the engine's private configuration as JSON
on standard input. Everything else is `Driver.run`, as in the caller's process.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from rankzero import bounds, store
from rankzero.bounds import STORE_OUTAGE
from rankzero.driver.delegation import Delegation
from rankzero.driver.driver import Driver
from rankzero.engines.base import Engine
from rankzero.host import descendants
from rankzero.host.processes import allow_open_files, is_gone, pidfd_of, settle_signals
from rankzero.job import Job
from rankzero.run.directory import RunDirectory

logger = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
"""Format of the lines in a driver's own log."""


def when_gone(process: dict[str, Any] | None, then: Callable[[], None], *pipes: int) -> None:
    """Calls a function, in a thread, once a process has exited.

    Args:
        process: The process, as `this_process` describes it.
        then: The function.
        pipes: Descriptors whose input or end of file counts, too. Of a pipe of the process alone, a child that the
            process has forked may keep the other end open for longer.
    """
    watched = None if process is None else pidfd_of(process)
    sources, interval = ([*pipes], bounds.POLL_INTERVAL_LONGEST) if watched is None else ([*pipes, watched], None)

    def watch() -> None:
        while not (process and is_gone(process)) and not select.select(sources, [], [], interval)[0]:
            pass
        then()

    threading.Thread(target=watch, name="rankzero-owner", daemon=True).start()


def main() -> None:
    """Entry point of the detached driver."""
    parser = argparse.ArgumentParser(prog="python -m rankzero.driver.main", description=__doc__)
    parser.add_argument("run_directory")
    parser.add_argument("--submission", type=int, required=True, help="which submission of the run to drive")
    parser.add_argument(
        "--owner", type=int, help="file descriptor of a pipe; input or end of file there cancels the run"
    )
    arguments = parser.parse_args()
    settle_signals()
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    drive(RunDirectory(arguments.run_directory), arguments.submission, lambda: json.load(sys.stdin), arguments.owner)


def _job(run: RunDirectory, submission: int) -> Job:
    """Returns the run's job, which is that of this submission or of a later one."""
    if run.job().submission < submission:
        # A delayed submitter of an older submission may have overwritten job.json.
        run.restore(submission)
    return run.job()


def drive(
    run: RunDirectory,
    submission: int,
    read_private: Callable[[], Mapping[str, Any]],
    owner: int | None = None,
    engine: Engine | None = None,
) -> NoReturn:
    """Claims a submission, drives it, and exits this process. It may delegate the submission to a driver in its stage.

    Args:
        run: The run.
        submission: Number of the submission.
        read_private: Returns `Request.private`.
        owner: File descriptor of the owner's pipe; None for a run with a lease.
        engine: The engine of a driver in its stage; None takes the engine of the job.
    """
    from rankzero.engines.specs import engine_from_spec

    # A store that fails for a moment must not end the run.
    job = store.patiently(lambda: _job(run, submission), STORE_OUTAGE, bounds.STORE_RETRY_INTERVAL, store.is_missing)
    if job.submission != submission:
        sys.exit(f"{run.directory} was submitted again before this driver started")
    private = read_private()
    if private.get("nonce", job.nonce) != job.nonce:
        sys.exit(f"{run.directory} was removed and submitted again before this driver started")
    engine = engine or engine_from_spec(job.engine, private["engine"])
    may_delegate = engine.can_host_driver(run, job)
    if not (may_delegate or run.claim_driver(job.submission, STORE_OUTAGE)):
        sys.exit(f"{run.directory} has a driver already")
    allow_open_files()
    trackers = private.get("trackers")
    # The modules of the trackers' classes are found there.
    sys.path += [entry for entry in (trackers or {}).get("path", ()) if entry not in sys.path]
    driver = Driver(run, job, engine, private["env"], leased=owner is None, trackers=trackers)

    def on_signal(number: int, _: object) -> None:
        driver.inbox.interrupt(f"the driver got {signal.Signals(number).name}")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, on_signal)
    if owner is not None:
        exited = "the process that called run() has exited"
        when_gone(job.owner, functools.partial(driver.inbox.interrupt, exited), owner)
    elif private.get("retrier"):
        when_gone(private["retrier"], driver.inbox.note_retrier_gone)
    code = 1
    try:
        refused = is_delegated = None
        if may_delegate:
            delegation = Delegation(run, job, engine, private, driver.inbox)
            try:
                is_delegated = delegation.run()
            except Exception as error:
                if not delegation.has_claimed:
                    raise
                refused = error
        if not is_delegated:
            driver.run(refused)
        code = int(driver.superseded)
    except BaseException:
        logger.exception("the outcome of the run could not be written")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if not driver.left_nothing:
            descendants.kill_all()
        # A driver whose run has ended must exit even if a JVM or a thread hangs.
        os._exit(code)
