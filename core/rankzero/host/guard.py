"""The guard: a small process above an agent or a warm server, in which whatever that leaves comes together.

Children of a rank that have cleared their environment, started sessions of their own and lost their parents are found
by nothing but the kernel: orphans go to the nearest subreaper above them. An agent is one, and a killed agent is none.
The caller must not become one, since it is not rankzero's process. So the guard does: it starts the agent, waits for
its end, and then ends everything below itself. A guard that is killed itself is noticed by its agent, which ends.

Standard library only; Linux. Elsewhere agents start without a guard.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal

from rankzero.host import descendants
from rankzero.host.processes import settle_signals

COMMAND = "RANKZERO_GUARDED"
"""Variable with the command line that the guard starts, as JSON: not among its own arguments, where people and tests
would take it for the command itself."""

GUARD = "RANKZERO_GUARD"
"""Variable that tells a process the id of its guard."""

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def watch() -> int | None:
    """Returns a descriptor that can be read when this process's guard has ended; None if it has none."""
    guard = os.environ.pop(GUARD, "")
    if not guard:
        return None
    if os.getppid() != int(guard):
        raise SystemExit("the guard of this process has ended")
    return os.pidfd_open(int(guard))


def main() -> None:
    """Starts the command of `COMMAND`, waits for its end, and ends all that it left."""
    settle_signals()
    command: list[str] = json.loads(os.environ.pop(COMMAND))
    holder = os.getppid()
    try:
        os.close(os.pidfd_open(holder))
    except OSError:
        # A sandbox or an old kernel, or no holder any more.
        os.execv(command[0], command)
    descendants.become_subreaper()
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.execve(command[0], command, {**os.environ, GUARD: str(guard)})
    _let_go()
    for number in _PASSED_ON:
        signal.signal(number, lambda received, _: _send(child, received))
    # Asked for by the holder. SIGKILL to this process would leave the rest to the child, which may be stuck.
    signal.signal(signal.SIGQUIT, lambda *_: _send(child, signal.SIGKILL))
    status = _await_end(child, holder)
    descendants.kill_all()
    _end_alike(status)


def _let_go() -> None:
    """Closes what the child has: its input, its socket, its lock. Only the child's own end must be seen there."""
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.closerange(3, min(limit, 1 << 20) if limit > 0 else 1 << 20)


def _await_end(child: int, holder: int) -> int:
    """Returns the child's status, and wakes a stopped child when the process has ended that holds it."""
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
    """Ends as the child has, for the holder, which sees this process alone."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)
