"""Pure decisions about a run, from facts to verdict: no clock, no socket, no process.

The bounds that the driver applies have their names here too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rankzero.bounds import HEARTBEAT_INTERVAL
from rankzero.errors import KILLED, LOST, PREEMPTED, RETRYABLE

STOP_MARGIN = 2.0
"""Seconds beyond the grace after which agents that do not say goodbye are cancelled at the engine, and again
after which the engine is given up."""

END_PATIENCE = 25.0
"""Seconds of silence after which agents are given up that were informed of the end: they run exit handlers, and
deliver log lines that still wait."""

CAUSE_WINDOW = 0.8
"""Seconds to wait for the true cause when the first failure looks like a consequence of another."""

AGENT_LOST_WINDOW = 2.0
"""Seconds to wait for the engine's own explanation when an agent's connection ended."""

STACKS_WINDOW = 3.0
"""Seconds to wait for the ranks' stacks once a run counts as hung."""

RESTART_DELAY_LIMIT = 60.0
"""Longest pause in seconds before a restart."""


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
        retryable: The user's code asked for another try.
        log_tail: The last lines that the rank printed, oldest first.
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
    retryable: bool = False
    log_tail: tuple[str, ...] = ()

    @property
    def restart_cause(self) -> str | None:
        """What a restart is decided by; None for an exception of the user's code."""
        if self.retryable:
            return RETRYABLE
        if self.signal == "SIGTERM":
            return PREEMPTED
        if self.signal:
            return KILLED
        return LOST if self.collateral else None

    @property
    def headline(self) -> str:
        """One line that says what happened."""
        if self.exception_type:
            return f"{self.exception_type}: {self.message}".rstrip(": ")
        if self.signal:
            hint = SIGNAL_HINTS.get(self.signal)
            return (self.message or f"killed by {self.signal}") + (f" ({hint})" if hint else "")
        return self.message or f"exited with code {self.exit_code} before it returned"


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


def is_conclusive(failures: Sequence[Failure], waited: float) -> bool:
    """True if the first cause is known: something that is no echo, or nothing more after the window."""
    return any(not failure.collateral for failure in failures) or waited >= CAUSE_WINDOW


def failure_message(
    cause: Failure, same: Sequence[int], others: Sequence[str], log_tail: Sequence[str], directory: str
) -> str:
    """The text a person reads: first cause, traceback, last lines, the others, where to look."""
    parts = [f"rank {cause.rank} on {cause.host} failed: {cause.headline}"]
    if cause.traceback:
        parts.append(cause.traceback.rstrip())
    elif log_tail:
        parts += [f"Last log lines of rank {cause.rank}:", *(f"  {line}" for line in log_tail)]
    if same:
        parts.append(f"The same failure: {name_ranks(same)}")
    if others:
        parts += ["Then failed:", *(f"  {line}" for line in others)]
    parts.append(f"Logs of all ranks: {directory}/logs")
    return "\n".join(parts)


def same_as(cause: Failure, failures: Sequence[Failure]) -> list[int]:
    """Other ranks that failed of the very same thing, numbers in the text aside."""
    kind = _kind(cause)
    return sorted(other.rank for other in failures if other is not cause and _kind(other) == kind)


def group_others(failures: Sequence[Failure], cause: Failure) -> list[str]:
    """One line for each different failure after the first, with the ranks that share it."""
    groups: dict[tuple[str, bool], list[Failure]] = {}
    for failure in sorted(failures, key=lambda failure: failure.order):
        if failure is not cause and _kind(failure) != _kind(cause):
            groups.setdefault(_kind(failure), []).append(failure)
    lines = []
    for (_, collateral), members in groups.items():
        note = " (a consequence)" if collateral else ""
        first_line = members[0].headline.splitlines()[0][:200]
        lines.append(f"{name_ranks([failure.rank for failure in members])}: {first_line}{note}")
    return lines


def _kind(failure: Failure) -> tuple[str, bool]:
    """What equal failures share: addresses, ports and ranks in a text are not part of it."""
    return re.sub(r"\d+", "<n>", failure.headline.splitlines()[0]), failure.collateral


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 2-5``: runs of three and more are drawn together."""
    pieces: list[str] = []
    members = sorted(set(ranks))
    start = 0
    for index, rank in enumerate(members):
        if index + 1 == len(members) or members[index + 1] != rank + 1:
            run = members[start : index + 1]
            pieces += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(member) for member in run]
            start = index + 1
    return ("rank " if len(members) == 1 else "ranks ") + ", ".join(pieces)


@dataclass(frozen=True)
class Restarts:
    """How often a run was restarted, and how often it may be. Preemptions have a budget of their own."""

    max_restarts: int
    max_preemptions: int
    restarts: int = 0
    preemptions: int = 0

    def after(self, cause: str | None) -> tuple[Restarts, float] | None:
        """The budget that is left and the pause in seconds before the next attempt; None to give up.

        The pause is 0, 1, 3, 7 ... seconds for one restart after another, up to `RESTART_DELAY_LIMIT`.
        """
        if cause is None:
            return None
        count = self.preemptions if cause == PREEMPTED else self.restarts
        if count >= (self.max_preemptions if cause == PREEMPTED else self.max_restarts):
            return None
        left = replace(self, preemptions=count + 1) if cause == PREEMPTED else replace(self, restarts=count + 1)
        return left, min(2.0 ** min(count, 10) - 1, RESTART_DELAY_LIMIT)


def beat_interval(hang_timeout: float | None) -> float:
    """Seconds between two heartbeats of a worker: often enough to tell progress within ``hang_timeout``."""
    return HEARTBEAT_INTERVAL if hang_timeout is None else min(HEARTBEAT_INTERVAL, hang_timeout / 5)


def is_hung(progress: Iterable[float], now: float, hang_timeout: float) -> bool:
    """True if the rank that progressed last did so longer than ``hang_timeout`` seconds ago.

    Args:
        progress: Monotonic time of the last progress of every rank.
        now: Monotonic time.
        hang_timeout: Seconds.
    """
    return now - max(progress) > hang_timeout


COLLECTIVE_SIGNS = ("torch/distributed/", "torch/nn/parallel/distributed", "_engine_run_backward")
"""Parts of stack lines by which a rank is seen to be inside a collective (or the backward pass that makes them)."""


def not_in_collective(stacks: Mapping[int, str]) -> list[int]:
    """Ranks whose stack shows no collective while another rank's does; empty if no rank waits in one."""
    waiting = {rank for rank, stack in stacks.items() if any(sign in stack for sign in COLLECTIVE_SIGNS)}
    return sorted(set(stacks) - waiting) if waiting else []


def hang_message(hang_timeout: float, stacks: Mapping[int, str], missing: Sequence[int], directory: str) -> str:
    """The text of a hang: who is missing, then where each rank stood, equal stacks once."""
    parts = [f"no rank made progress for hang_timeout={hang_timeout} s"]
    if missing:
        waiting = sorted(set(stacks) - set(missing))
        parts.append(f"{name_ranks(missing)} had not joined the collective in which {name_ranks(waiting)} waited")
    groups: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items(), key=lambda item: (item[0] not in missing, item[0])):
        groups.setdefault(stack, []).append(rank)
    for stack, ranks in groups.items():
        parts += [f"{name_ranks(ranks)} stood at:", *(f"  {line}" for line in stack.splitlines())]
    parts.append("Progress is a call of rankzero.train.report or a step of a torch optimizer.")
    parts.append(f"Logs of all ranks: {directory}/logs")
    return "\n".join(parts)


def order_tasks(hosts: Sequence[str]) -> list[int]:
    """Task indices in rank order: host by host, hosts in order of their first task.

    Args:
        hosts: Host of each task, by task index.
    """
    first_seen = {host: index for index, host in reversed(list(enumerate(hosts)))}
    return sorted(range(len(hosts)), key=lambda task: (first_seen[hosts[task]], task))
