"""Starts drivers: on the cluster if the engine can, else as processes of this machine or a thread of this process."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from typing import IO, Any

from rankzero.bounds import CANCEL_TIMEOUT
from rankzero.errors import EngineError, RankZeroError, located
from rankzero.host.processes import fork_safe, unnamed_file
from rankzero.job import Job
from rankzero.run.directory import DRIVER_LOG, Submission
from rankzero.run.handle import RunHandle
from rankzero.run.observer import signal_cancel
from rankzero.submit.start import Request
from rankzero.threads import in_thread

logger = logging.getLogger(__name__)


class DriverProcess(subprocess.Popen[bytes]):
    """A driver process on this machine."""

    output: IO[bytes]
    """The file without a name to which the driver prints if the run is on an object store."""

    def last_output(self) -> bytes:
        """Returns the end of what the driver has printed."""
        size, most = os.fstat(self.output.fileno()).st_size, 16 << 10
        return os.pread(self.output.fileno(), most, max(0, size - most))

    def cancel(self) -> None:
        """Makes the driver end the run on request, without the store."""
        if self.poll() is None:
            signal_cancel(self.pid)

    def await_end(self, timeout: float) -> None:
        """Waits until the driver has exited, or for the given seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout)


# Drivers that this process started. A submitted driver outlives its handle; keeping it here lets
# poll() reap it even if no handle is left.
_drivers: list[DriverProcess] = []
_drivers_lock = fork_safe(threading.Lock())


def start(own: Submission, request: Request) -> RunHandle[Any]:
    """Starts the driver of a run in another process. Raises EngineError if a cluster does not accept it."""
    if not request.engine.drives_elsewhere:
        return RunHandle(own.run.directory, start_driver(own, request.private()), job=own.job)
    handle = RunHandle[Any](own.run.directory, job=own.job)
    try:
        with located(own.run.directory):
            request.engine.start_driver(own, {**request.private(), "nonce": own.job.nonce})
    except RankZeroError as error:
        if not own.has_driver():
            raise
        logger.warning("the driver of run %s has started although its submission reported: %s", handle.id, error)
    return handle


def start_driver(own: Submission, private: dict[str, Any]) -> DriverProcess:
    """Starts a driver in its own session, with its output in ``driver.log``, and sends it `Request.private`."""
    import rankzero

    package_root = os.path.dirname(os.path.dirname(os.path.abspath(rankzero.__file__)))
    # Like `python -m rankzero.driver.main`, also if rankzero is only on this process's sys.path. -P: the working
    # directory is the user's, and a driver must not import from it.
    # pyspark's client of Spark Connect takes a main module without a file for a doctest, and imports its test tools.
    program = "import sys; sys.path.append(sys.argv.pop(1)); import rankzero.driver.main as driver; "
    program += "__file__ = driver.__file__; driver.main()"
    number = str(own.job.submission)
    command = [sys.executable, "-P", "-c", program, package_root, own.run.directory, "--submission", number]
    # An object store cannot append: the starter of the driver can read a file without a name.
    output: IO[bytes] = tempfile.TemporaryFile() if own.is_remote else open(own.path(DRIVER_LOG), "a+b")
    # It disappears whichever process dies, and never blocks as a pipe.
    with unnamed_file() as private_file:
        private_file.write(json.dumps({**private, "nonce": own.job.nonce}).encode())
        private_file.seek(0)
        driver = DriverProcess(
            command, stdin=private_file, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    driver.output = output
    if own.is_remote:
        weakref.finalize(driver, output.close)
    else:
        output.close()
    with _drivers_lock:
        _drivers[:] = [other for other in _drivers if other.poll() is None] + [driver]
    return driver


def driving(own: Submission, request: Request) -> contextlib.AbstractContextManager[RunHandle[Any]]:
    """Returns a context manager that starts the driver of a run, which ends with the block."""
    is_apart = request.engine.drives_elsewhere or request.engine.prefers_own_process
    drive = _process_driver if is_apart else _thread_driver
    return drive(own, request, request.template.stop_grace + CANCEL_TIMEOUT())


@contextlib.contextmanager
def _process_driver(own: Submission, request: Request, stop_timeout: float) -> Iterator[RunHandle[Any]]:
    """Starts a driver in another process, which ends its run with the block.

    It also ends the run when this process exits, or on a cluster when no process follows the run.
    """
    owner = os.getpid()
    # An interrupt before the block finds a driver that has not begun, and the caller records the end.
    handle = start(own, request)
    try:
        yield handle
    finally:
        # The driver's own status decides: this process may only have counted the driver as dead. A forked child that
        # leaves the block does not own the run.
        if os.getpid() == owner:

            def end() -> None:
                handle.cancel()
                if handle.wait(stop_timeout) and not own.has_driver():
                    # It died at its start, and other processes would wait for its first heartbeat.
                    own.finish(handle.status())

            # The store may not answer.
            with contextlib.suppress(Exception):
                in_thread(end).result(stop_timeout)


@contextlib.contextmanager
def _thread_driver(own: Submission, request: Request, stop_timeout: float) -> Iterator[RunHandle[Any]]:
    """Starts a driver in a thread of this process, which ends its run with the block.

    Raises:
        EngineError: another submitter has the directory by now: it counted this process, which was stopped, as dead.
    """
    # Imported here, because a process that only submits does not drive.
    from rankzero.driver.driver import Driver, DriverThread

    owner = os.getpid()
    # As other processes read it, with lists in place of tuples.
    own = Submission(own.run, Job.from_json(own.job.to_json()))
    if not own.claim_driver() or own.is_lost():
        raise EngineError(f"the run in {own.run.directory} was removed or submitted again before its driver started")
    driver = Driver(own, request.engine, dict(request.env), trackers=request.trackers)
    thread = DriverThread(driver)
    try:
        # Within the block: an interrupt may arrive as soon as the thread has started.
        thread.start()
        yield RunHandle(own.run.directory, thread, job=own.job)
    except BaseException as interrupt:
        thread.driver.watch.interrupt(
            f"the caller was interrupted by {type(interrupt).__name__}: {interrupt}".rstrip(": ")
        )
        raise
    else:
        if not (driver.recorder.status.final or driver.recorder.status.certain):
            # The caller saw a final status that the driver did not write: no training may continue without an owner.
            driver.watch.interrupt("the process that called run() no longer follows it")
    finally:
        # A forked child has no copy of the thread.
        if thread.ident is not None and os.getpid() == owner:
            thread.await_end(stop_timeout)
    if thread.error:
        raise thread.error
