"""Finding and ending every process below this one.

The agent makes itself a child subreaper (Linux), so a grandchild whose parent died, even one
that started its own session, comes back to the agent and is found here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

KILL_TIMEOUT = 5.0
"""Seconds after which a process that SIGKILL did not end (stuck in the kernel) is given up."""

_REAP_INTERVAL = 0.01


def _prctl(option: int, value: int) -> None:
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def become_subreaper() -> None:
    """Orphans below this process are re-parented to it. Linux; elsewhere a no-op."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process when its parent dies. Linux; elsewhere a no-op."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def find() -> list[int]:
    """Process ids of all descendants of this process. Empty where there is no /proc."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat") as file:
                # The command in parentheses may hold spaces and parentheses itself.
                state, parent = file.read().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[int(name)] = int(parent)
    family = {os.getpid()}
    while True:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        if not more:
            return sorted(family - {os.getpid()})
        family |= more


def kill_all(sessions: list[int]) -> None:
    """SIGKILL for every descendant and for the given process groups, until none is left.

    Gives up after `KILL_TIMEOUT`: only a process stuck in the kernel survives that.
    """
    deadline = time.monotonic() + KILL_TIMEOUT
    for session in sessions:
        with contextlib.suppress(OSError):
            os.killpg(session, signal.SIGKILL)
    while time.monotonic() < deadline:
        for pid in find():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not _reap():
            return
        time.sleep(_REAP_INTERVAL)


def _reap() -> bool:
    """Collects ended children; True while there are live ones."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
