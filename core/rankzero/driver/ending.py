"""The end of an attempt: the facts, the judgement over them, the host to blame, and the text of each error.

Everything is pure: no clock, no socket, no process.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankzero.advice import known
from rankzero.channel.messages import Failed
from rankzero.driver import policy
from rankzero.driver.hangs import RETURNED_HANG, is_waiting
from rankzero.driver.policy import name_ranks
from rankzero.driver.roster import Member
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
    StartTimeoutError,
    WorkerFailedError,
)
from rankzero.values.ref import ResultRef

Success = tuple[ResultRef, list[Any]]
"""Rank 0's handle, and the value itself in a list if it is small JSON; else an empty list."""


@dataclass(frozen=True)
class Failure:
    """The failure of one rank.

    Attributes:
        rank: Global rank.
        host: Host of the rank, as the host names itself.
        report: The facts, with secrets masked.
        placed_on: Host of the rank, as the engine names it; None before ranks are numbered.
        order: Position in which the failure reached the driver, from 0.
    """

    rank: int
    host: str
    report: Failed
    placed_on: str | None = None
    order: int = 0

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
        num_processes: Number of ranks.
        directory: The run directory, for the text of errors.
        returned: Ranks whose function has returned. They may still write checkpoints, and rank 0 its value.
        finished: Ranks whose checkpoints have arrived as well; rank 0 when its value is stored. The run needs nothing
            more from them.
        over: Ranks that have finished or failed, or whose process or agent is gone: they wait for no other rank.
        failures: The failures of ranks in the order in which they arrived.
        stored: Rank 0's value, once it is stored.
        refusal: An error of the driver itself, such as a store that refuses the value; the last one counts.
        is_given_up: True once the stored values are about to be deleted, so that no success is possible any more.
        engine_ended: True once the engine reports that all agents have ended.
        engine_error: The error with which they did.
    """

    num_processes: int
    directory: str
    returned: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    over: set[int] = field(default_factory=set)
    failures: list[Failure] = field(default_factory=list)
    stored: Success | None = None
    refusal: RankZeroError | None = None
    is_given_up: bool = False
    engine_ended: bool = False
    engine_error: BaseException | None = None

    def note_failure(self, failure: Failure) -> bool:
        """Adds a failure; returns False for a rank that had finished, since its success stands."""
        if failure.rank in self.finished:
            return False
        self.failures.append(failure)
        self.over.add(failure.rank)
        return True

    def note_stored(self, ref: ResultRef, value: list[Any]) -> None:
        """Records that the value of rank 0 is stored, which finishes the rank."""
        self.stored = ref, value
        self.finished.add(0)

    @property
    def success(self) -> Success | None:
        """The result as soon as every rank has finished; no later event takes a success back."""
        return self.stored if len(self.finished) >= self.num_processes and not self.is_given_up else None


@dataclass(frozen=True)
class Verdict:
    """The end of an attempt.

    Attributes:
        success: The result, if it succeeded.
        error: The error, if it did not.
        blamed: The host that may have caused the error, as the engine names it.
        cause: The failure of a rank that the error reports, if it reports one.
    """

    success: Success | None = None
    error: BaseException | None = None
    blamed: str | None = None
    cause: Failure | None = None


Explain = Callable[[BaseException], RankZeroError]
"""Returns the typed error for an error of the engine."""


def cannot_succeed(facts: Facts, gone: Sequence[Member]) -> bool:
    """Returns True once a report excludes the success of the attempt.

    Args:
        facts: The reports so far.
        gone: Agents that exited before they were asked to, or are lost.
    """
    if facts.success:
        return False
    return bool(facts.failures or facts.refusal or facts.engine_ended or _needed(facts, gone))


def is_certain(facts: Facts) -> bool:
    """Returns True if no later report can be the first cause of an attempt that cannot succeed."""
    return bool(facts.success or facts.engine_ended or (facts.failures and not suspects(facts))) or bool(
        facts.refusal and not facts.failures
    )


def judge(
    facts: Facts,
    gone: Sequence[Member],
    explain: Explain,
    stacks: Mapping[int, str],
) -> Verdict:
    """Returns how an attempt has ended that has succeeded or cannot succeed.

    Args:
        facts: The reports.
        gone: Agents that exited before they were asked to, or are lost, or have been silent for long.
        explain: Returns the typed error for the engine's error.
        stacks: Stacks of ranks that have not failed, if only consequences are known.
    """
    if facts.success:
        return Verdict(success=facts.success)
    if facts.failures:
        if gone and all(failure.report.collateral for failure in facts.failures):
            # The peers of a lost host see only broken connections, even if that host had finished its own work.
            return _lost(gone[0], facts, explain)
        return failed(facts, {rank: stacks[rank] for rank in suspects(facts) if rank in stacks})
    if facts.refusal:
        return Verdict(error=facts.refusal)
    if needed := _needed(facts, gone):
        return _lost(needed[0], facts, explain)
    error = facts.engine_error or RuntimeError("the agents ended before every rank had returned")
    return Verdict(error=explain(error))


def _needed(facts: Facts, gone: Sequence[Member]) -> list[Member]:
    """Returns the agents that are gone too early: one whose ranks have all finished is no longer needed."""
    return [member for member in gone if not member.ranks or not facts.finished.issuperset(member.ranks)]


def first_cause(failures: Sequence[Failure]) -> Failure:
    """Returns the failure that explains the others: the earliest that is not a consequence of another one."""
    return min(failures, key=lambda failure: (failure.report.collateral, failure.order))


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


def host_to_blame(failures: Sequence[Failure]) -> str | None:
    """Returns the host that may have caused the first failure; None for the user's code, or for several hosts."""
    cause = first_cause(failures) if failures else None
    if cause is None or cause.report.collateral or cause.restart_cause not in (KILLED, MATCHED):
        return None
    hosts = {failure.placed_on for failure in failures if failure.kind == cause.kind}
    return hosts.pop() if len(hosts) == 1 else None


# -- the text of errors ----------------------------------------------------------------------------


def failed(facts: Facts, stacks: Mapping[int, str]) -> Verdict:
    """Returns the end of an attempt by failures of ranks; `judge` has stacks if only consequences are known."""
    cause = first_cause(facts.failures)
    return Verdict(None, _failed(cause, facts, stacks), host_to_blame(facts.failures), cause)


def _failed(cause: Failure, facts: Facts, stacks: Mapping[int, str]) -> RankZeroError:
    report = cause.report
    if report.cause == "no-torch":
        return EngineError(report.message)
    if report.exception_type == "rankzero.errors.ResultError" and cause.restart_cause is None:
        return ResultError(report.message)
    others = group_others(facts.failures, cause)
    same = sorted(other.rank for other in facts.failures if other is not cause and other.kind == cause.kind)
    text = [f"rank {cause.rank} on {cause.host} failed: {cause.headline}"]
    if report.traceback:
        text.append(report.traceback.rstrip())
    elif report.log_tail:
        text += [f"Last log lines of rank {cause.rank}:", *(f"  {line}" for line in report.log_tail)]
    if same:
        text.append(f"The same failure: {name_ranks(same)}")
    if others:
        text += ["Then failed:", *(f"  {line}" for line in others)]
    if report.collateral:
        text.append("Only consequences are known: no rank reported a failure of its own.")
    if stacks:
        text += [f"{name_ranks(list(stacks))} had not failed.", *policy.stack_lines(stacks)]
    text.append(f"Logs of all ranks: rankzero logs {shlex.quote(facts.directory)}")
    return WorkerFailedError(
        "\n".join(text),
        rank=cause.rank,
        host=cause.host,
        exception_type=report.exception_type,
        traceback=report.traceback,
        exit_code=report.exit_code,
        signal=report.signal,
        log_tail=report.log_tail,
        others=([f"{name_ranks(same)}: the same"] if same else []) + others,
        cause=cause.restart_cause,
    )


def group_others(failures: Sequence[Failure], cause: Failure | None = None) -> list[str]:
    """Returns one line for each different failure after the first cause, with the ranks that share it."""
    groups: dict[tuple[str, bool], list[Failure]] = {}
    for failure in sorted(failures, key=lambda failure: failure.order):
        if cause is None or failure.kind != cause.kind:
            groups.setdefault(failure.kind, []).append(failure)
    lines = []
    for (_, collateral), members in groups.items():
        note = " (a consequence)" if collateral else ""
        first_line = members[0].headline.splitlines()[0][:200]
        lines.append(f"{name_ranks([failure.rank for failure in members])}: {first_line}{note}")
    return lines


def _lost(member: Member, facts: Facts, explain: Explain) -> Verdict:
    """Returns the end of an attempt whose agent exited before it was asked to."""
    first, cause = member.first_rank or 0, member.restart_cause
    ranks = name_ranks(range(first, first + member.workers))
    why = member.why_left or "it sends no sign of life: its host died or the network to it is cut"
    text = [f"task {member.task} on {member.name} ({ranks}) was lost: {why}"]
    if facts.engine_ended and facts.engine_error:
        explained = explain(facts.engine_error)
        text.append(str(explained))
        cause = getattr(explained, "cause", None) or cause
    if others := group_others(facts.failures):
        text += ["Then failed:", *(f"  {line}" for line in others)]
    blamed = member.host if member.restart_cause != PREEMPTED else None
    return Verdict(error=EngineError("\n".join(text), cause=cause), blamed=blamed)


def hung(bound: float, stacks: Mapping[int, str], silent: list[int], directory: str) -> HangError:
    """Returns the error of a run that hangs: the missing ranks, and the stack of each rank.

    Args:
        bound: Seconds without progress of any rank or, if some are silent, without their heartbeats.
        stacks: The stack of each rank.
        silent: Ranks that have returned and send no heartbeat.
        directory: The run directory.
    """
    if silent:
        why = f"{name_ranks(silent)} returned, and then sent no heartbeat for hang_timeout={bound} s"
        return _hang_error(why, stacks, silent, directory)
    waiting = {rank for rank, stack in stacks.items() if is_waiting(stack)}
    missing = sorted(set(stacks) - waiting) if waiting else []
    return _hang_error(f"no rank made progress for hang_timeout={bound} s", stacks, missing, directory)


def left_waiting(returned: Collection[int], stacks: Mapping[int, str], directory: str) -> HangError:
    """Returns the error of ranks that wait in a collective for ranks that have returned, with the stack of each."""
    names = name_ranks(sorted(returned))
    others = name_ranks(sorted(set(stacks) - set(returned)))
    why = (
        f"{names} returned, and {others} waited for {RETURNED_HANG():g} s in a collective that never ends without "
        f"{names}: a training must call every collective in every rank equally often"
    )
    return _hang_error(why, stacks, sorted(returned), directory)


def _hang_error(why: str, stacks: Mapping[int, str], missing: list[int], directory: str) -> HangError:
    text = [why]
    if missing:
        waiting = sorted(set(stacks) - set(missing))
        text.append(f"{name_ranks(missing)} had not joined the collective in which {name_ranks(waiting)} waited")
    text += policy.stack_lines(dict(sorted(stacks.items(), key=lambda item: (item[0] not in missing, item[0]))))
    text.append("Progress is a call of rankzero.train.report or a step of a torch optimizer.")
    text.append(f"Logs of all ranks: rankzero logs {shlex.quote(directory)}")
    return HangError("\n".join(text), stacks={str(rank): stack for rank, stack in stacks.items()}, missing=missing)


def start_timeout(
    bound: float, num_tasks: int, missing_tasks: Sequence[int], missing_ranks: Sequence[int]
) -> StartTimeoutError:
    """Returns the error of ranks that did not start within ``bound`` seconds; it names the missing tasks or ranks."""
    # Rank 0 opens the rendezvous after every rank has imported torch.
    missing = [f"task {task}" for task in missing_tasks] or [f"rank {rank}" for rank in missing_ranks] or ["rank 0"]
    what = policy.starting_message(num_tasks, missing_tasks, missing_ranks)
    to_do = "raise start_timeout of the Launcher if they are only slow"
    text = f"the ranks did not start within start_timeout={bound} s: {what}; {to_do}"
    return StartTimeoutError(text, missing=missing)
