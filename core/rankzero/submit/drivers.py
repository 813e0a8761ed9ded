"""Starts drivers outside of this process: on the cluster if the engine can, else as processes of this machine."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from typing import IO, Any

from rankzero.errors import EngineError, RankZeroError
from rankzero.host.processes import describe_process, fork_safe
from rankzero.run.directory import RunDirectory
from rankzero.run.handle import RunHandle
from rankzero.submit.prepare import Request

logger = logging.getLogger(__name__)


class DriverProcess(subprocess.Popen[bytes]):
    """A driver process on this machine."""

    def await_end(self, timeout: float) -> None:
        """Waits until the driver has exited, or for the given seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout)


# Drivers that this process started. A submitted driver outlives its handle; keeping it here lets
# poll() reap it even if no handle is left.
_drivers: list[DriverProcess] = []
_drivers_lock = fork_safe(threading.Lock())


def start(run: RunDirectory, request: Request) -> RunHandle[Any]:
    """Starts the driver of a run that outlives this process, and returns a handle of the run.

    Raises:
        EngineError: the cluster does not accept the driver.
    """
    if not request.engine.drives_elsewhere:
        return RunHandle(run.directory, start_driver(run, request.private()))
    handle = RunHandle[Any](run.directory)
    try:
        request.engine.start_driver(run, request.private())
    except BaseException as error:
        problem = error if isinstance(error, RankZeroError) else EngineError(f"{type(error).__name__} while submitting")
        # The process that claims the driver's role controls the run: a driver that was accepted despite the error
        # finds it claimed and exits.
        if run.claim_driver(run.job().submission):
            run.write_status(replace(run.status(), state="failed", error=problem.to_json(), ended=time.time()))
            raise
        if problem is not error:
            raise
        logger.warning("the driver of run %s has started although its submission reported: %s", handle.id, error)
    return handle


def start_driver(run: RunDirectory, private: dict[str, Any], owner: int | None = None) -> DriverProcess:
    """Starts a driver in its own session, with its output in ``driver.log``.

    Args:
        run: The run to drive.
        private: The result of `Request.private`, for the driver's standard input.
        owner: Descriptor of a pipe: the run ends when its other end closes. None for a run that outlives this process.
    """
    import rankzero

    package_root = os.path.dirname(os.path.dirname(os.path.abspath(rankzero.__file__)))
    # Like `python -m rankzero.driver.main`, also if rankzero is only on this process's sys.path. -P: the working
    # directory is the user's, and a driver must not import from it.
    # pyspark's client of Spark Connect takes a main module without a file for a doctest, and imports its test tools.
    program = "import sys; sys.path.append(sys.argv.pop(1)); import rankzero.driver.main as driver; "
    program += "__file__ = driver.__file__; driver.main()"
    submission = run.job().submission
    command = [sys.executable, "-P", "-c", program, package_root, run.directory, "--submission", str(submission)]
    if owner is not None:
        command += ["--owner", str(owner)]
    # A file without a name: it disappears whichever process dies, and unlike a pipe it never blocks.
    with _open_driver_log(run) as log, _open_private() as private_file:
        private_file.write(json.dumps(private).encode())
        private_file.seek(0)
        driver = DriverProcess(
            command,
            stdin=private_file,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[owner] if owner is not None else [],
            start_new_session=True,
        )
    # On a busy host its first heartbeat may be late: until then readers query its process.
    with contextlib.suppress(OSError):
        run.record_starting(submission, describe_process(driver.pid))
    with _drivers_lock:
        _drivers[:] = [other for other in _drivers if other.poll() is None] + [driver]
    return driver


def _open_private() -> IO[bytes]:
    """Opens an unnamed file, in memory where the system can, which needs no writable directory."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("rankzero-private"), "w+b")
    return tempfile.TemporaryFile()


def _open_driver_log(run: RunDirectory) -> IO[bytes]:
    if run.is_remote:
        return open(os.devnull, "wb")
    return open(run.path("driver.log"), "ab")
