"""The driver: owns the engine and decides about attempts. In the caller's process or in its own.

``python -m rankzero.driver RUN_DIR`` is the detached form; everything it needs is in the run
directory. Both forms run `Driver.run`.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable

from rankzero.attempt import DRIVER, INTERRUPT, TICK, Attempt, Inbox, check_cancel, look_interval
from rankzero.engines.base import Engine, EngineSession
from rankzero.errors import EngineError, RankZeroError, RunCancelledError, StartTimeoutError
from rankzero.record import Recorder
from rankzero.run import RunDirectory

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT = 10.0
"""Seconds for an engine session to close (a SparkContext to stop)."""

_OPENED = "engine-opened"


class Driver:
    """Runs one run directory to its end and writes the outcome there."""

    def __init__(self, run: RunDirectory, engine: Engine, on_line: Callable[[str], None] | None = None) -> None:
        self._run = run
        self._engine = engine
        self._recorder = Recorder(run, on_line)
        self.inbox = Inbox()

    def run(self) -> None:
        """Never raises for a run that failed: the status says so.

        Raises:
            BaseException: what interrupted the caller's thread (a signal handler, ``on_line``), after
                the run was ended.
        """
        attempt: Attempt | None = None
        try:
            job = self._run.job()
            self._recorder.update(state="starting")
            deadline = time.monotonic() + job.start_timeout
            session = self._open(deadline)
            try:
                attempt = Attempt(self._run, job, self._recorder, session, self.inbox)
                attempt.run(deadline, self._run.private())
            finally:
                _within(CLOSE_TIMEOUT, session.close)
        except RunCancelledError as error:
            self._finish(attempt, "cancelled", error)
        except RankZeroError as error:
            self._finish(attempt, "failed", error)
        except BaseException as interrupt:
            text = f"the driver was interrupted by {type(interrupt).__name__}: {interrupt}".rstrip(": ")
            self._finish(attempt, "cancelled", RunCancelledError(text))
            raise
        else:
            self._finish(attempt, "failed", EngineError("the attempt ended without an outcome"))

    def _finish(self, attempt: Attempt | None, state: str, error: RankZeroError) -> None:
        """Writes the end: success if every rank had committed, whatever came after that."""
        outcome = attempt.outcome if attempt else None
        if outcome is None:
            self._recorder.finish(state=state, error=error.to_json())
        else:
            result, value = outcome
            self._recorder.finish(state="succeeded", result=result.to_json(), value=value)

    def _open(self, deadline: float) -> EngineSession:
        """Opens the engine in a thread, so that a cluster that does not answer cannot hold us."""
        job = self._run.job()

        def open_engine() -> None:
            try:
                opened: object = self._engine.open(job)
            except BaseException as error:
                opened = error
            self.inbox.put(DRIVER, {"type": _OPENED, "session": opened})

        threading.Thread(target=open_engine, name="rankzero-engine", daemon=True).start()
        next_look = 0.0
        while True:
            with contextlib.suppress(queue.Empty):
                _, message = self.inbox.queue.get(timeout=TICK)
                if message["type"] == INTERRUPT:
                    raise RunCancelledError(message["reason"])
                opened = message["session"]
                if isinstance(opened, EngineSession):
                    return opened
                if isinstance(opened, RankZeroError):
                    raise opened
                raise EngineError(f"the engine could not be opened: {opened}") from opened
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + look_interval(self._run)
                check_cancel(self._run)
            if time.monotonic() > deadline:
                raise StartTimeoutError(
                    f"the engine {job.engine} did not answer within start_timeout={job.start_timeout} s",
                    missing=["engine"],
                )


def _within(seconds: float, action: Callable[[], None]) -> None:
    """Runs an action in a thread and gives it up after a bound."""
    done = threading.Event()

    def act() -> None:
        try:
            action()
        except Exception:
            logger.warning("an engine session did not close cleanly", exc_info=True)
        finally:
            done.set()

    threading.Thread(target=act, name="rankzero-close", daemon=True).start()
    if not done.wait(seconds):
        logger.warning("an engine session did not close within %s s", seconds)


def _claim(run: RunDirectory) -> bool:
    """True for the first driver of a run directory, False for every other one."""
    if run.is_remote:
        return True
    try:
        os.close(os.open(run.path("driver.claim"), os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return False
    return True


def _watch_owner(fd: int, inbox: Inbox) -> None:
    """Cancels the run when the process at the other end of the pipe is gone, however it went."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(fd, 1):
                pass
        inbox.interrupt("the process that called run() is gone")

    threading.Thread(target=watch, name="rankzero-owner", daemon=True).start()


def main() -> None:
    """Entry point of the detached driver."""
    parser = argparse.ArgumentParser(prog="python -m rankzero.driver", description=__doc__)
    parser.add_argument("run_directory")
    parser.add_argument("--owner", type=int, help="file descriptor of a pipe; its end cancels the run")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from rankzero.engines.specs import engine_from_spec

    run = RunDirectory(arguments.run_directory)
    if not _claim(run):
        sys.exit(f"{run.directory} has a driver already")
    driver = Driver(run, engine_from_spec(run.job().engine, run.private()["engine"]))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _: driver.inbox.interrupt(f"the driver got {signal.Signals(got).name}"))
    if arguments.owner is not None:
        _watch_owner(arguments.owner, driver.inbox)
    try:
        driver.run()
    except BaseException:
        logger.exception("the driver was interrupted")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Nothing that a JVM or a stuck thread does may hold a driver whose run has ended.
        os._exit(0)


if __name__ == "__main__":
    main()
