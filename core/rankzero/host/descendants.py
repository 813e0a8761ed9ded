"""Finds and ends all descendants of this process.

The agent makes itself a child subreaper (Linux): a grandchild whose parent died, even one in its own session, is
re-parented to the agent and found here.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterator
from typing import Any

from rankzero import bounds

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        _libc().prctl(option, value, 0, 0, 0)


@functools.cache
def _libc() -> Any:
    import ctypes

    return ctypes.CDLL(None)


def become_subreaper() -> None:
    """Makes the kernel re-parent orphaned descendants to this process. Linux; elsewhere a no-op."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def signal_on_parent_death(number: signal.Signals) -> None:
    """Makes the kernel send a signal to this process when its parent dies. Linux; elsewhere a no-op."""
    _prctl(_PR_SET_PDEATHSIG, number)


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent dies (Linux); exits if the parent has died already.

    Args:
        parent: The expected process id of the parent.
    """
    signal_on_parent_death(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def find(but: Collection[int] = ()) -> list[int]:
    """Returns the process ids of all descendants of this process, except the children ``but`` and their descendants.

    Without /proc (macOS), ``ps`` lists them; descendants whose parent has exited are then missing (see `kill_all`).
    """
    parents = _parents() if os.path.isdir("/proc/self") else _listed_parents()
    family = {os.getpid()}
    while True:
        more = {pid for pid, parent in parents.items() if parent in family and pid not in but} - family
        if not more:
            return sorted(family - {os.getpid()})
        family |= more


def _parents() -> dict[int, int]:
    """Returns the parent of each live process, read from /proc."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat") as file:
                # The command in parentheses may hold spaces and parentheses itself.
                state, parent = file.read().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[int(name)] = int(parent)
    return parents


def _listed_parents() -> dict[int, int]:
    """Returns the parent of each live process, as POSIX's ``ps`` lists them."""
    columns = ["-o", "pid=", "-o", "ppid=", "-o", "state="]
    try:
        listing = subprocess.Popen(["ps", "-A", *columns], stdout=subprocess.PIPE, text=True)
    except OSError:
        return {}
    lines = [line.split() for line in listing.communicate()[0].splitlines()]
    live = {int(pid): int(parent) for pid, parent, state, *_ in lines if not state.startswith("Z")}
    live.pop(listing.pid, None)
    return live


def kill_all(but: Collection[int] = (), groups: Collection[int] = ()) -> None:
    """Kills all descendants, except the children ``but`` and their descendants, until none is left.

    Processes that clean up after others (Python's resource tracker, torch's shared memory manager) exit by themselves
    after their clients: they are killed after `CLEANERS_TIMEOUT`. Gives up after `KILL_TIMEOUT`, which only a process
    stuck in the kernel survives.

    Args:
        but: Children to leave alive.
        groups: Process groups of children, killed as a whole where orphans are not re-parented to this process (macOS).
    """
    if not os.path.isdir("/proc/self"):
        for leader in groups:
            with contextlib.suppress(OSError):
                os.killpg(leader, signal.SIGKILL)
    start = time.monotonic()
    while time.monotonic() < start + bounds.KILL_TIMEOUT:
        if not but and not _reap():
            return
        family = find(but)
        if but and not family:
            return
        spares_cleaners = time.monotonic() < start + bounds.CLEANERS_TIMEOUT
        cleaners = {pid for pid in family if spares_cleaners and _is_cleaner(pid)}
        for pid in family:
            if pid not in cleaners:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(bounds.REAP_INTERVAL)


def _is_cleaner(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        command = file.read()
        return b"multiprocessing.resource_tracker" in command or b"torch_shm_manager" in command
    return False


def ended_children() -> Iterator[tuple[int, int]]:
    """Reaps the children that have exited: yields process id and status, as waitpid returns them. Never blocks."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            yield ended


def _reap() -> bool:
    """Reaps exited children; returns True while there are live ones."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
