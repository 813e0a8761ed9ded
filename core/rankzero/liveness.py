"""Does a process of this machine live? The first question about a driver; the heartbeat answers for other hosts."""

from __future__ import annotations

import contextlib
import os
import socket

STOPPED = frozenset("tT")


def process_namespace() -> str:
    """Names the boot and the process namespace (Linux), else the host: where a process id is valid."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def process_state(pid: int) -> str | None:
    """The one-letter state that Linux gives a process; None if it is gone (a zombie is); ``"?"`` if unknown."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
            return None if state == "Z" else state
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
