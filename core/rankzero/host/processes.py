"""Processes of this machine: does one live, and what may this one have open.

Whether it lives is the first question about a driver; the heartbeat answers for other hosts.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
from typing import Any

_START = 19  # starttime is field 22 of /proc/PID/stat; the first that is left after the name is field 3.
STOPPED = frozenset("tT")

OPEN_FILES = 1 << 16
"""Open files that a process of a run may have, where the system lets it: some libraries count through all of them, so
not the billion that some containers allow."""


def allow_open_files() -> None:
    """Raises this process's limit of open files, for itself and what it starts, as far as it may.

    Shells give 1,024: too few for the connections of a thousand agents, and for tensors that data loaders share.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; real-time signals have numbers only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def process_namespace() -> str:
    """Names the boot and the process namespace (Linux), else the host: where a process id is valid."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def this_process() -> dict[str, Any]:
    """What `is_gone` needs to know of this process."""
    return {"pid": os.getpid(), "start": process_start(os.getpid()), "namespace": process_namespace()}


def is_gone(process: dict[str, Any]) -> bool:
    """True if a process that `this_process` described has ended; False if it lives or cannot be asked from here."""
    return process["namespace"] == process_namespace() and process_state(process["pid"], process["start"]) is None


def pidfd_of(process: dict[str, Any]) -> int | None:
    """A descriptor that can be read when a process that `this_process` described has ended; None if it has, or cannot.

    Where there is none (no Linux, another process namespace), ask `is_gone`.
    """
    if process["namespace"] != process_namespace() or not hasattr(os, "pidfd_open"):
        return None
    try:
        descriptor = os.pidfd_open(process["pid"])
    except OSError:
        return None
    if is_gone(process):
        # Another process has its id by now.
        os.close(descriptor)
        return None
    return descriptor


def process_start(pid: int) -> str | None:
    """When a process started, in clock ticks since the boot (Linux): tells it from a later one of the same id."""
    with contextlib.suppress(OSError):
        return _stat(pid)[_START]
    return None


def process_state(pid: int, start: str | None) -> str | None:
    """The one-letter state that Linux gives a process; None if it has exited (a zombie has); ``"?"`` if unknown.

    Args:
        pid: Its id.
        start: What `process_start` said of it; another process of that id is not it.
    """
    try:
        facts = _stat(pid)
        return None if facts[0] == "Z" or start not in (None, facts[_START]) else facts[0]
    except (FileNotFoundError, ProcessLookupError):
        if os.path.isdir("/proc/self"):
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return "?"
    return "?"


def _stat(pid: int) -> list[str]:
    with open(f"/proc/{pid}/stat") as file:
        # The name in parentheses may hold spaces and parentheses itself.
        return file.read().rpartition(")")[2].split()
