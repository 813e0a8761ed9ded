"""The end of an attempt: the facts, the judgement over them, what follows, and the text of each error.

Everything is pure: no clock, no socket, no process.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rankzero import bounds
from rankzero.channel.messages import Failed
from rankzero.errors import (
    KILLED,
    LOST,
    MATCHED,
    PREEMPTED,
    RETRYABLE,
    EngineError,
    HangError,
    RankZeroError,
    ResultError,
    WorkerFailedError,
    known,
)
from rankzero.host.network import is_loopback
from rankzero.values.ref import ResultRef

RESTART_PAUSE_MAX = bounds.scaled(60.0)  # Longest pause in seconds before a restart

Success = tuple[ResultRef, list[Any]]
"""Rank 0's handle, and the value itself in a list if it is small JSON; else an empty list."""


@dataclass
class Member:
    """An agent, as its driver knows it.

    Attributes:
        host: Name or address of its host, as the engine knows it; ``address`` is the one from which it connects.
        name: Name of its host, as the host itself reports it.
        workers: Number of its ranks.
        first_rank: Its first rank; until all agents have joined, the one that it would have with tasks in order.
        ready: Those of its ranks, from 0, that have imported torch.
        why_left: Text that explains why it exited before it was asked to, or is lost; None while it is needed.
        restart_cause: The cause that then decides about a restart.
    """

    task: int
    host: str
    address: str
    name: str
    python: str
    gpus: Sequence[str]
    workers: int
    first_rank: int = 0
    ready: set[int] = field(default_factory=set)
    why_left: str | None = None
    restart_cause: str = LOST

    @property
    def ranks(self) -> range:
        """The ranks of this agent."""
        return range(self.first_rank, self.first_rank + self.workers)

    def leave(self, why: str, restart_cause: str = LOST) -> None:
        """Records that the agent exited before it was asked to, or is lost; the first reason counts."""
        if self.why_left is None:
            self.why_left, self.restart_cause = why, restart_cause

    def addresses(self, *, for_one_host: bool) -> list[str]:
        """Returns the addresses under which all ranks may reach this agent's, the preferred one first."""
        found = list(dict.fromkeys([self.host, self.address]))
        # Elsewhere a loopback address means a different host.
        return found if for_one_host else [one for one in found if not is_loopback(one)] or found

    def why_unfit(self, python: str, use_gpu: bool) -> str | None:
        """Returns a message that says why the agent cannot run ranks of this job; None if it can.

        ``python`` is ``major.minor`` of the Python that pickled the function.
        """
        where = f"task {self.task} on {self.name}"
        if ".".join(self.python.split(".")[:2]) != python:
            text = f"the function was pickled by Python {python}, but {where} runs Python {self.python}"
            return f"{text}: point spark.pyspark.python to a Python {python}"
        if use_gpu and len(self.gpus) < self.workers:
            return f"{where} was given the GPUs {self.gpus} for {self.workers} ranks; each rank needs one of its own"
        return None


@dataclass(frozen=True)
class Failure:
    """The failure of one rank: its host, as that names itself and as the engine does, and what is known of it."""

    rank: int
    host: str
    placed_on: str
    report: Failed

    @property
    def restart_cause(self) -> str | None:
        """The cause that decides about a restart; None for an exception of the user's code."""
        report = self.report
        if report.retryable:
            return RETRYABLE
        if report.matched is not None:
            return MATCHED
        if report.signal:
            return PREEMPTED if report.signal == "SIGTERM" else KILLED
        is_unexplained = report.exception_type is None and not report.message
        return LOST if report.collateral or is_unexplained else None

    @property
    def headline(self) -> str:
        """The failure in one line."""
        report = self.report
        if report.exception_type:
            return f"{report.exception_type}: {report.message}".rstrip(": ")
        if report.signal:
            found = known(f"killed by {report.signal}")
            return (report.message or f"killed by {report.signal}") + (f" ({found[1]})" if found else "")
        return report.message or f"exited with code {report.exit_code} before it returned"

    @property
    def kind(self) -> tuple[str, bool]:
        """A key that equal failures share; numbers, such as ports and ranks, are not part of it."""
        return re.sub(r"\d+", "<n>", self.headline.splitlines()[0]), self.report.collateral


@dataclass
class Facts:
    """The reports of ranks, agents and engine so far, on which the end of an attempt depends.

    Attributes:
        directory: The run directory, for the text of errors.
        returned: Ranks whose function has returned. They may still write checkpoints, and rank 0 its value.
        finished: Ranks whose checkpoints have arrived as well; rank 0 when its value is stored. The run needs nothing
            more from them.
        over: Ranks that have finished or failed, or whose process or agent is gone: they wait for no other rank.
        failures: The failures of ranks in the order in which they arrived.
        stored: Rank 0's value, once it is stored, which finishes the rank.
        refusal: An error of the driver itself, such as a store that refuses the value; the last one counts.
        engine_ended: True once the engine reports that all agents have ended, with ``engine_error`` if with an error.
    """

    num_processes: int
    directory: str
    returned: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    over: set[int] = field(default_factory=set)
    failures: list[Failure] = field(default_factory=list)
    stored: Success | None = None
    refusal: RankZeroError | None = None
    engine_ended: bool = False
    engine_error: BaseException | None = None

    def note_failure(self, failure: Failure) -> bool:
        """Adds a failure; returns False for a rank that had finished, since its success stands."""
        if failure.rank in self.finished:
            return False
        self.failures.append(failure)
        self.over.add(failure.rank)
        return True

    @property
    def success(self) -> Success | None:
        """The result as soon as every rank has finished; no later event takes a success back."""
        return self.stored if len(self.finished) >= self.num_processes else None


@dataclass(frozen=True)
class Verdict:
    """The end of an attempt: the result or the error, the host to blame by its name to the engine, and the cause."""

    success: Success | None = None
    error: BaseException | None = None
    blamed: str | None = None
    cause: Failure | None = None


def cannot_succeed(facts: Facts, gone: Sequence[Member]) -> bool:
    """Returns True once a report excludes the success of the attempt, or an agent that is gone too early."""
    if facts.success:
        return False
    return bool(facts.failures or facts.refusal or facts.engine_ended or _needed(facts, gone))


def is_certain(facts: Facts) -> bool:
    """Returns True if no later report can be the first cause of an attempt that cannot succeed."""
    if facts.failures:
        return bool(facts.success) or not suspects(facts)
    return bool(facts.success or facts.engine_ended or facts.refusal)


def judge(facts: Facts, gone: Sequence[Member], explained: RankZeroError | None, stacks: Mapping[int, str]) -> Verdict:
    """Returns how an attempt has ended that has succeeded or cannot succeed.

    Args:
        facts: The reports.
        gone: Agents that exited before they were asked to, or are lost.
        explained: The typed error of the engine, if all agents have ended.
        stacks: Stacks of ranks that have not failed, if only consequences are known.
    """
    if facts.success:
        return Verdict(success=facts.success)
    if facts.failures:
        if gone and all(failure.report.collateral for failure in facts.failures):
            # The peers of a lost host see only broken connections, even if that host had finished its own work.
            return _lost(gone[0], facts, explained)
        return failed(facts, {rank: stacks[rank] for rank in suspects(facts) if rank in stacks})
    if facts.refusal:
        return Verdict(error=facts.refusal)
    # Ranks of an agent that is gone may have finished since then. Its peers may wait for it.
    if lost := _needed(facts, gone) or (not facts.engine_ended and gone):
        return _lost(lost[0], facts, explained)
    return Verdict(error=explained)


def _needed(facts: Facts, gone: Sequence[Member]) -> list[Member]:
    """Returns the agents that are gone too early: one whose ranks have all finished is no longer needed."""
    return [member for member in gone if not facts.finished.issuperset(member.ranks)]


def first_cause(failures: Sequence[Failure]) -> Failure:
    """Returns the failure that explains the others: the earliest that is not a consequence of another one."""
    return min(failures, key=lambda failure: failure.report.collateral)


def suspects(facts: Facts) -> list[int]:
    """Returns the ranks that may still report the first cause; empty if a known failure is no consequence."""
    if facts.engine_ended or any(not failure.report.collateral for failure in facts.failures):
        return []
    return sorted(set(range(facts.num_processes)) - facts.over)


def settled(verdict: Verdict, facts: Facts) -> Verdict:
    """Returns the verdict, corrected by what was stored or reported while the ranks were stopped."""
    if facts.success:
        return Verdict(success=facts.success)
    is_same = verdict.cause is None or first_cause(facts.failures) is verdict.cause
    return verdict if is_same else failed(facts, {})


@dataclass(frozen=True)
class Restarts:
    """The restarts of a run so far and the most that are allowed; preemptions have a budget of their own."""

    max_restarts: int
    max_preemptions: int
    restarts: int = 0
    preemptions: int = 0

    def after(self, cause: str | None) -> tuple[Restarts, float] | None:
        """Returns the budget that is left and the seconds to pause before the next attempt; None to give up.

        The pause is 0, 1, 3, 7 ... seconds for one restart after another, up to `RESTART_PAUSE_MAX`.
        """
        if cause is None:
            return None
        count = self.preemptions if cause == PREEMPTED else self.restarts
        if count >= (self.max_preemptions if cause == PREEMPTED else self.max_restarts):
            return None
        left = replace(self, preemptions=count + 1) if cause == PREEMPTED else replace(self, restarts=count + 1)
        return left, min(2.0 ** min(count, 10) - 1, RESTART_PAUSE_MAX())


# -- the text of errors ----------------------------------------------------------------------------


def failed(facts: Facts, stacks: Mapping[int, str]) -> Verdict:
    """Returns the end of an attempt by failures of ranks; `judge` has stacks if only consequences are known."""
    cause = first_cause(facts.failures)
    report, others = cause.report, group_others(facts.failures, cause)
    if report.cause == "no-torch":
        return Verdict(error=EngineError(report.message), cause=cause)
    if report.exception_type == "rankzero.errors.ResultError" and cause.restart_cause is None:
        return Verdict(error=ResultError(report.message), cause=cause)
    text = [f"rank {cause.rank} on {cause.host} failed: {cause.headline}"]
    if report.traceback:
        text.append(report.traceback.rstrip())
    elif report.log_tail:
        text += [f"Last log lines of rank {cause.rank}:", *(f"  {line}" for line in report.log_tail)]
    text += _then_failed(others)
    if report.collateral:
        text.append("Only consequences are known: no rank reported a failure of its own.")
    if stacks:
        text += [f"{name_ranks(list(stacks))} had not failed.", *stack_lines(stacks)]
    error = WorkerFailedError(
        "\n".join([*text, _logs(facts.directory)]),
        rank=cause.rank,
        host=cause.host,
        exception_type=report.exception_type,
        traceback=report.traceback,
        exit_code=report.exit_code,
        signal=report.signal,
        log_tail=report.log_tail,
        others=others,
        cause=cause.restart_cause,
    )
    # The user's code, and what fails on several hosts, is no host's fault.
    hosts = {failure.placed_on for failure in facts.failures if failure.kind == cause.kind}
    is_of_host = cause.restart_cause in (KILLED, MATCHED) and not report.collateral and len(hosts) == 1
    return Verdict(None, error, hosts.pop() if is_of_host else None, cause)


def group_others(failures: Sequence[Failure], cause: Failure | None = None) -> list[str]:
    """Returns one line for each different failure beside the first cause, with the ranks that share it."""
    groups: dict[tuple[str, bool], list[Failure]] = {}
    for failure in failures:
        if failure is not cause:
            groups.setdefault(failure.kind, []).append(failure)
    lines = []
    for kind, members in groups.items():
        what = "the same" if cause and kind == cause.kind else members[0].headline.splitlines()[0][:200]
        note = " (a consequence)" if kind[1] else ""
        lines.append(f"{name_ranks([failure.rank for failure in members])}: {what}{note}")
    return lines


def _then_failed(others: Sequence[str]) -> list[str]:
    return ["Then failed:", *(f"  {line}" for line in others)] if others else []


def _logs(directory: str) -> str:
    return f"Logs of all ranks: rankzero logs {shlex.quote(directory)}"


def _lost(member: Member, facts: Facts, explained: RankZeroError | None) -> Verdict:
    """Returns the end of an attempt whose agent exited before it was asked to."""
    text = [f"task {member.task} on {member.name} ({name_ranks(member.ranks)}) was lost: {member.why_left}"]
    cause = member.restart_cause
    if explained and facts.engine_error:
        text.append(str(explained))
        cause = getattr(explained, "cause", None) or cause
    error = EngineError("\n".join(text + _then_failed(group_others(facts.failures))), cause=cause)
    return Verdict(error=error, blamed=member.host if member.restart_cause != PREEMPTED else None)


def hung(why: str, stacks: Mapping[int, str], missing: Sequence[int], directory: str) -> HangError:
    """Returns the error of a run that hangs, with the stacks; the missing ranks are those for which the others wait."""
    text = [why]
    if missing:
        waiting = sorted(set(stacks) - set(missing))
        text.append(f"{name_ranks(missing)} had not joined the collective in which {name_ranks(waiting)} waited")
    text += stack_lines(dict(sorted(stacks.items(), key=lambda item: (item[0] not in missing, item[0]))))
    text += ["Progress is a call of rankzero.train.report or a step of a torch optimizer.", _logs(directory)]
    found = {str(rank): stack for rank, stack in stacks.items()}
    return HangError("\n".join(text), stacks=found, missing=list(missing))


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


NO_REPLY = "no answer: it is stopped (SIGSTOP) or runs native code that holds the GIL, or its agent or network hangs"
"""The stack of a rank whose agent did not reply to a request for it."""


def stack_lines(stacks: Mapping[int, str]) -> list[str]:
    """Returns lines with the stack of each rank, in the given order, equal stacks once."""
    groups: dict[str, list[int]] = {}
    for rank, stack in stacks.items():
        groups.setdefault(stack, []).append(rank)
    lines = []
    for stack, ranks in groups.items():
        lines += [f"{name_ranks(ranks)} stood at:", *(f"  {line}" for line in stack.splitlines())]
    return lines
