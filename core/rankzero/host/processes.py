"""Processes of this machine: their identity, whether they are alive, their signals and limits, and their descendants.

Whether a driver is alive is decided by its process on the same host, and by its heartbeat on other hosts. The agent
makes itself a child subreaper (Linux): a grandchild whose parent died, even one in its own session, is re-parented to
the agent, which finds and ends it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import select
import signal
import socket
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from typing import IO, Any, TypeVar

from rankzero import bounds

KILL_TIMEOUT = bounds.stretched(5.0)  # To exit after SIGKILL; a process may be stuck in the kernel
REAP_INTERVAL = 0.01  # Seconds between two polls for killed processes
CLEANERS_TIMEOUT = bounds.stretched(1.0)  # For processes to remove the shared memory of killed ranks
OPEN_FILES = 1 << 16  # Most open files of a process: some libraries iterate over all that a container allows, a billion
_START = 19  # starttime is field 22 of /proc/PID/stat; the first that is left after the name is field 3.
STOPPED = frozenset("tT")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

T = TypeVar("T")


def allow_open_files() -> None:
    """Raises the limit of open files of this process and its later children to `OPEN_FILES`, as far as permitted.

    A shell's default of 1,024 is too low for the connections of 1,000 agents, and for tensors that data loaders share.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


_KEPT_IGNORED = frozenset({signal.SIGPIPE, getattr(signal, "SIGXFSZ", signal.SIGPIPE)})
"""Signals that Python itself ignores, so that a write fails with an exception."""

SIGNALS: frozenset[int] = frozenset(map(int, signal.valid_signals()))


def settle_signals() -> None:
    """Gives this process an empty signal mask and default dispositions, whatever its parent had.

    A started process inherits what its parent's thread had blocked or ignored. With SIGCHLD blocked, an agent would
    never notice that a rank was killed; with SIGTERM blocked, a rank could not save a last checkpoint.
    """
    for number in SIGNALS - _KEPT_IGNORED:
        if signal.getsignal(number) == signal.SIG_IGN:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            # SIGKILL and SIGSTOP have no disposition that could be set.
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, default)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def fork_safe(lock: T) -> T:
    """Returns a lock that is free in each forked child, whichever thread of the parent held it at the fork."""
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock


def unnamed_file() -> IO[bytes]:
    """Returns a new file that goes with the last process that has it open: in memory, where the system can."""
    return open(os.memfd_create("rankzero"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as ``SIGKILL`` for 9; a real-time signal gives its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@functools.cache
def process_namespace() -> str:
    """Returns the scope in which a process id is valid and no network can be cut; else the name of the host.

    On Linux these are the boot, the process namespace and the network namespace.
    """
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.readlink('/proc/self/ns/net')}"
    return socket.gethostname()


def this_process() -> dict[str, Any]:
    """Returns the facts about this process by which `is_gone` recognizes it."""
    return describe_process(os.getpid())


def describe_process(pid: int) -> dict[str, Any]:
    """Returns the facts about a living process of this machine by which `is_gone` recognizes it."""
    return {"pid": pid, "start": process_start(pid), "namespace": process_namespace()}


def readable(descriptors: Iterable[int], timeout: float | None) -> list[int]:
    """Waits for input or the end of file of a descriptor; returns those that have one. ``timeout`` is in seconds."""
    # select.select raises ValueError for descriptors above 1023, which a process with many open files has.
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [ready for ready, _ in poll.poll(None if timeout is None else max(0.0, timeout) * 1000)]


def is_gone(process: dict[str, Any]) -> bool:
    """Returns True if a process that `this_process` described has exited; False if it is alive or not visible here."""
    return process["namespace"] == process_namespace() and process_state(process["pid"], process["start"]) is None


def pidfd_of(process: dict[str, Any]) -> int | None:
    """Returns a descriptor that becomes readable when a process that `this_process` described has exited.

    Returns:
        The pidfd; None if the process has exited or has none (no Linux, another namespace): then use `is_gone`.
    """
    if process["namespace"] != process_namespace() or not hasattr(os, "pidfd_open"):
        return None
    try:
        descriptor = os.pidfd_open(process["pid"])
    except OSError:
        return None
    if is_gone(process):
        # The pidfd is that of a later process with the same id.
        os.close(descriptor)
        return None
    return descriptor


def process_start(pid: int) -> str | None:
    """Returns when a process started, in clock ticks since the boot (Linux); distinguishes processes of one id."""
    with contextlib.suppress(OSError):
        return _stat(pid)[_START]
    return None


def process_state(pid: int, start: str | None) -> str | None:
    """Returns the one-letter state of a process in Linux; None if it has exited, as a zombie has; else an empty text.

    Args:
        pid: The id of the process.
        start: The result of `process_start` for it, which a later process of that id does not have; or None.
    """
    try:
        facts = _stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None if os.path.isdir("/proc/self") else ""
    return None if facts[0] == "Z" or start not in (None, facts[_START]) else facts[0]


def _stat(pid: int | str) -> list[str]:
    """Returns the fields of /proc/PID/stat, from the state on."""
    with open(f"/proc/{pid}/stat") as file:
        # The name in parentheses may hold spaces and parentheses itself.
        return file.read().rpartition(")")[2].split()


def caught_signals(pid: int) -> frozenset[int] | None:
    """Returns the signals for which a process has handlers (Linux); None where the kernel does not report them."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        mask = next((int(line.split()[1], 16) for line in file if line.startswith("SigCgt:")), 0)
        return frozenset(number for number in SIGNALS if mask >> (number - 1) & 1)
    return None


def _prctl(option: int, value: int) -> None:
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def become_subreaper() -> None:
    """Makes the kernel re-parent orphaned descendants to this process. Linux; elsewhere a no-op."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Makes the kernel send a signal to this process when its parent dies (Linux); exits if that has happened.

    Args:
        parent: The expected process id of the parent.
        number: The signal. SIGCONT wakes a stopped process that watches its parent.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def find_descendants() -> list[int]:
    """Returns the process ids of all live descendants of this process; none without /proc (macOS)."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                state, parent = _stat(name)[:2]
                if state != "Z":
                    parents[int(name)] = int(parent)
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sorted(family - {os.getpid()})


def kill_descendants(groups: Collection[int] = ()) -> bool:
    """Kills all descendants until none is left; returns False if some survive `KILL_TIMEOUT`, stuck in the kernel.

    Processes that clean up after others (Python's resource tracker, torch's shared memory manager) exit by themselves
    after their clients: they are killed after `CLEANERS_TIMEOUT`.

    Args:
        groups: Process groups of children, killed as a whole where there is no /proc (macOS).
    """
    if not os.path.isdir("/proc/self"):
        for leader in groups:
            with contextlib.suppress(OSError):
                os.killpg(leader, signal.SIGKILL)
    start = time.monotonic()
    while time.monotonic() < start + KILL_TIMEOUT():
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        spares_cleaners = time.monotonic() < start + CLEANERS_TIMEOUT()
        for pid in find_descendants():
            if not (spares_cleaners and _is_cleaner(pid)):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(REAP_INTERVAL)
    return False


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
