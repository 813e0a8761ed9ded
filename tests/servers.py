"""Servers of others, which tests start and end: JVMs, webservers, schedulers."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.conftest import describe, is_alive, until

STOP_TIMEOUT = 90.0  # Seconds for a server to end by itself, beside other work

GONE = 30.0  # Seconds for the kernel to end what got SIGKILL


def start(*command: str, log: Path, **options: Any) -> subprocess.Popen[bytes]:
    """Starts a server in a session of its own, whose output goes to the end of ``log``.

    It has the default disposition of every signal: what this process ignores, a server would ignore, too. A shell's
    background job ignores SIGINT, and Dagster makes of it that SIGTERM is ignored. It gets SIGTERM when the tests are
    killed, which then cannot `stop` it.
    """
    prepared = ["env", "--default-signal", *(["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else [])]
    with open(log, "ab") as output:
        return subprocess.Popen(
            [*prepared, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **options,
        )


def stop(processes: Sequence[subprocess.Popen[bytes]], timeout: float = STOP_TIMEOUT) -> None:
    """Ends servers of `start`: SIGTERM, after ``timeout`` seconds SIGKILL to all that they started.

    Raises:
        TimeoutError: something of their sessions is left.
    """
    for process in processes:
        process.terminate()
    with contextlib.suppress(TimeoutError):
        until(lambda: all(process.poll() is not None for process in processes), timeout, "an end")
    for process in processes:
        process.kill()
        for pid in session(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(GONE)
    left = [pid for process in processes for pid in session(process.pid)]
    until(lambda: not any(map(is_alive, left)), GONE, f"the end of {[describe(pid) for pid in left]}")


def session(leader: int) -> Iterator[int]:
    """Living processes of a session."""
    for name in os.listdir("/proc"):
        if name.isdigit() and is_alive(int(name)):
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(int(name)) == leader:
                    yield int(name)
