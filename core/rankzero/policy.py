"""Pure decisions about a run, from facts to verdict: no clock, no socket, no process.

The bounds that the driver applies have their names here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STOP_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL when a run fails or is cancelled."""

STOP_MARGIN = 6.0
"""Seconds beyond the grace after which agents that do not say goodbye are given up."""

CAUSE_WINDOW = 0.8
"""Seconds to wait for the true cause when the first failure looks like a consequence of another."""

AGENT_LOST_WINDOW = 2.0
"""Seconds to wait for the engine's own explanation when an agent's connection ended."""

HEARTBEAT_INTERVAL = 2.0
"""Seconds between two heartbeats in ``status.json``."""

DRIVER_DEAD_AFTER = 15.0
"""Seconds without a heartbeat after which a driver counts as dead."""

LOG_TAIL = 20
"""Log lines of a rank that are kept for an error message."""

LOG_TAIL_WIDTH = 2000
"""Characters of each of them."""

CLOCK_SKEW = 300.0
"""Seconds by which the clocks of two hosts may differ."""


@dataclass(frozen=True)
class Failure:
    """What is known of one rank's failure.

    Attributes:
        rank: Global rank.
        host: Where it ran.
        order: Position in which the driver heard of it, from 0.
        exception_type: None if the process died without an exception.
        message: The exception's text.
        traceback: The rank's traceback.
        exit_code: None if a signal ended it.
        signal: Name of the signal.
        collateral: The exception looks like the echo of another rank's death.
        cause: ``"no-torch"`` or None.
    """

    rank: int
    host: str
    order: int = 0
    exception_type: str | None = None
    message: str = ""
    traceback: str | None = None
    exit_code: int | None = None
    signal: str | None = None
    collateral: bool = False
    cause: str | None = None

    @property
    def headline(self) -> str:
        """One line that says what happened."""
        if self.exception_type:
            return f"{self.exception_type}: {self.message}".rstrip(": ")
        if self.signal:
            hint = SIGNAL_HINTS.get(self.signal)
            return f"killed by {self.signal}" + (f" ({hint})" if hint else "")
        return f"exited with code {self.exit_code} before it returned"


SIGNAL_HINTS = {
    "SIGKILL": "often the kernel's out-of-memory killer",
    "SIGABRT": "often a NCCL timeout or a failed assertion in native code",
    "SIGSEGV": "a crash in native code; the log shows the Python stack",
    "SIGBUS": "often a full /dev/shm or a file that was truncated while mapped",
    "SIGTERM": "something outside of the run asked it to end",
}


def first_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that explains the others: the earliest that is not the echo of another one."""
    return min(failures, key=lambda failure: (failure.collateral, failure.order))


def is_settled(failures: Sequence[Failure], waited: float) -> bool:
    """True if the first cause is known: something that is no echo, or nothing more after the window."""
    return any(not failure.collateral for failure in failures) or waited >= CAUSE_WINDOW


def failure_message(cause: Failure, others: Sequence[str], log_tail: Sequence[str], directory: str) -> str:
    """The text a person reads: first cause, traceback, last lines, the others, where to look."""
    parts = [f"rank {cause.rank} on {cause.host} failed: {cause.headline}"]
    if cause.traceback:
        parts.append(cause.traceback.rstrip())
    elif log_tail:
        parts += [f"Last log lines of rank {cause.rank}:", *(f"  {line}" for line in log_tail)]
    if others:
        parts += ["Then failed:", *(f"  {line}" for line in others)]
    parts.append(f"Logs of all ranks: {directory}/logs")
    return "\n".join(parts)


def group_others(failures: Sequence[Failure], cause: Failure) -> list[str]:
    """One line for each different failure after the first, with the ranks that share it."""
    ranks: dict[str, list[int]] = {}
    for failure in sorted(failures, key=lambda failure: failure.order):
        if failure is not cause:
            note = " (a consequence)" if failure.collateral else ""
            ranks.setdefault(failure.headline.splitlines()[0][:200] + note, []).append(failure.rank)
    return [f"rank {', '.join(map(str, sorted(who)))}: {what}" for what, who in ranks.items()]


def order_tasks(hosts: Sequence[str]) -> list[int]:
    """Task indices in rank order: host by host, hosts in order of their first task.

    Args:
        hosts: Host of each task, by task index.
    """
    first_seen = {host: index for index, host in reversed(list(enumerate(hosts)))}
    return sorted(range(len(hosts)), key=lambda task: (first_seen[hosts[task]], task))


def driver_is_dead(heartbeat: float, now: float, unchanged: float) -> bool:
    """True if a driver on another host has stopped.

    Args:
        heartbeat: Unix time of the last heartbeat, by the driver's clock.
        now: Unix time by the reader's clock, which may differ by `CLOCK_SKEW`.
        unchanged: Seconds for which the reader has seen this very heartbeat.
    """
    return unchanged > DRIVER_DEAD_AFTER or now - heartbeat > DRIVER_DEAD_AFTER + CLOCK_SKEW
