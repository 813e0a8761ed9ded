"""The guard: a small parent process of an agent or a warm server, which kills the descendants of one that was killed.

Children of a rank that have cleared their environment, started their own sessions and lost their parents can only be
found by the kernel, which re-parents orphans to the nearest subreaper above them. An agent is a subreaper, until it is
killed. The caller's process must not become one, since it is not rankzero's. So the guard does: it starts the agent,
waits for its exit, and then kills all its own descendants. If the guard itself is killed, its agent notices and ends.

Standard library only; Linux. Elsewhere agents start without a guard.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal

from rankzero.host import processes
from rankzero.host.processes import settle_signals

COMMAND = "RANKZERO_GUARDED"
"""Environment variable with the command line that the guard starts, as JSON. Among the guard's arguments, people and
tests would take the guard for the command itself."""

GUARD = "RANKZERO_GUARD"
"""Environment variable with the process id of a process's guard."""

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def watch() -> int | None:
    """Returns a descriptor that becomes readable when this process's guard has exited; None if it has no guard."""
    guard = os.environ.pop(GUARD, "")
    if not guard:
        return None
    if os.getppid() != int(guard):
        raise SystemExit("the guard of this process has ended")
    return os.pidfd_open(int(guard))


def main() -> None:
    """Starts the command in `COMMAND`, waits for its exit, and kills its remaining processes."""
    settle_signals()
    command: list[str] = json.loads(os.environ.pop(COMMAND))
    holder = os.getppid()
    try:
        os.close(os.pidfd_open(holder))
    except OSError:
        # A sandbox or an old kernel, or the parent has exited.
        os.execv(command[0], command)
    processes.become_subreaper()
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.execve(command[0], command, {**os.environ, GUARD: str(guard)})
    _close_descriptors()
    for number in _PASSED_ON:
        signal.signal(number, lambda received, _: _send(child, received))
    # Sent by the task process instead of SIGKILL, after which only the child, which may be stuck, could clean up.
    signal.signal(signal.SIGQUIT, lambda *_: _send(child, signal.SIGKILL))
    status = _await_end(child, holder)
    processes.kill_descendants()
    _end_alike(status)


def _close_descriptors() -> None:
    """Closes this process's copies of the child's input, sockets and locks, so that they close when the child exits."""
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.closerange(3, min(limit, 1 << 20) if limit > 0 else 1 << 20)


def _await_end(child: int, holder: int) -> int:
    """Waits for the child's exit status; wakes a stopped child when the task process has exited."""
    poll = select.poll()
    ended = os.pidfd_open(child)
    poll.register(ended, select.POLLIN)
    lost = None
    with contextlib.suppress(OSError):
        lost = os.pidfd_open(holder)
        poll.register(lost, select.POLLIN)
    if lost is None or os.getppid() != holder:
        _send(child, signal.SIGCONT)
    while ended not in (ready := [descriptor for descriptor, _ in poll.poll()]):
        if lost in ready:
            poll.unregister(lost)
            _send(child, signal.SIGCONT)
    return os.waitpid(child, 0)[1]


def _send(child: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(child, number)


def _end_alike(status: int) -> None:
    """Exits like the child, with its code or by its signal, for the task process, which sees only the guard."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)
