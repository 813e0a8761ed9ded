"""`Failure`: the facts about one failed rank, the choice of the first cause, and the text of the error."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rankzero.errors import KILLED, LOST, MATCHED, PREEMPTED, RETRYABLE

CAUSE_WINDOW = 0.8
"""Seconds to wait for the true cause when the first failure looks like a consequence of another."""


@dataclass(frozen=True)
class Failure:
    """The facts about one rank's failure.

    Attributes:
        rank: Global rank.
        host: Host of the rank.
        order: Position in which the failure reached the driver, from 0.
        exception_type: None if the process died without an exception.
        message: The exception's text.
        traceback: The rank's traceback.
        exit_code: Exit code of the process; None if a signal ended it.
        signal: Name of the signal that ended the process.
        collateral: True if the exception looks like a consequence of another rank's death.
        cause: ``"no-torch"`` or None.
        retryable: True if the user's code asked for another attempt.
        matched: The entry of the job's ``restart_on`` that the exception matches; None if no entry does.
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
    matched: str | None = None
    log_tail: tuple[str, ...] = ()

    @property
    def restart_cause(self) -> str | None:
        """The cause that decides about a restart; None for an exception of the user's code."""
        if self.retryable:
            return RETRYABLE
        if self.matched is not None:
            return MATCHED
        if self.signal == "SIGTERM":
            return PREEMPTED
        if self.signal:
            return KILLED
        return LOST if self.collateral else None

    @property
    def headline(self) -> str:
        """The failure in one line."""
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
    "SIGBUS": "often a full /dev/shm, or a file of a dataset or result that was overwritten in place",
    "SIGTERM": "something outside of the run asked it to end",
}


def first_cause(failures: Sequence[Failure]) -> Failure:
    """Returns the failure that explains the others: the earliest that is not a consequence of another one."""
    return min(failures, key=lambda failure: (failure.collateral, failure.order))


def is_conclusive(failures: Sequence[Failure], waited: float) -> bool:
    """Returns True if the first cause is known: a failure is no consequence, or the time to wait for one is over."""
    return any(not failure.collateral for failure in failures) or waited >= CAUSE_WINDOW


def failure_message(
    cause: Failure, same: Sequence[int], others: Sequence[str], log_tail: Sequence[str], directory: str
) -> str:
    """Returns the text of the error: the first cause, its traceback or last lines, the other failures, the logs."""
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
    """Returns the other ranks that failed for the same reason, ignoring numbers in the text."""
    kind = _kind(cause)
    return sorted(other.rank for other in failures if other is not cause and _kind(other) == kind)


def group_others(failures: Sequence[Failure], cause: Failure) -> list[str]:
    """Returns one line for each different failure after the first, with the ranks that share it."""
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
    """Returns a key that equal failures share; numbers, such as ports and ranks, are not part of it."""
    return re.sub(r"\d+", "<n>", failure.headline.splitlines()[0]), failure.collateral


def name_ranks(ranks: Sequence[int], noun: str = "rank") -> str:
    """Returns the ranks as text, with runs of three and more abbreviated: ``rank 3``, ``ranks 0, 2-5``."""
    pieces: list[str] = []
    members = sorted(set(ranks))
    start = 0
    for index, rank in enumerate(members):
        if index + 1 == len(members) or members[index + 1] != rank + 1:
            run = members[start : index + 1]
            pieces += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(member) for member in run]
            start = index + 1
    return (f"{noun} " if len(members) == 1 else f"{noun}s ") + ", ".join(pieces)
