"""Drivers in processes of their own, and those that this process started."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from typing import IO

from rankzero.run.directory import RunDirectory


class DriverProcess(subprocess.Popen[bytes]):
    """A driver in a process of its own."""

    def await_end(self, timeout: float) -> None:
        """Returns when it has ended, or after so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout)


# Drivers that this process started. A submitted driver outlives its handle; keeping it here lets
# poll() collect its exit status, whoever holds the handle.
_drivers: list[DriverProcess] = []
_drivers_lock = threading.Lock()


def start_driver(run: RunDirectory, owner: int | None) -> DriverProcess:
    """Starts a detached driver in its own session, with its output in ``driver.log``."""
    import rankzero

    package_root = os.path.dirname(os.path.dirname(os.path.abspath(rankzero.__file__)))
    # As `python -m rankzero.driver`, also where rankzero is found through this process's path only.
    program = "import sys; sys.path.append(sys.argv.pop(1)); from rankzero.driver.main import main; main()"
    submission = run.job().submission
    command = [sys.executable, "-c", program, package_root, run.directory, "--submission", str(submission)]
    if owner is not None:
        command += ["--owner", str(owner)]
    with _open_driver_log(run) as log:
        driver = DriverProcess(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[owner] if owner is not None else [],
            start_new_session=True,
        )
    with _drivers_lock:
        _drivers[:] = [other for other in _drivers if other.poll() is None] + [driver]
    return driver


def _open_driver_log(run: RunDirectory) -> IO[bytes]:
    if run.is_remote:
        return open(os.devnull, "wb")
    return open(run.path("driver.log"), "ab")
