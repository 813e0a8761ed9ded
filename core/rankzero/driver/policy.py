"""Pure decisions about a run, from facts to verdict: no clock, no socket, no process.

The bounds that the driver applies have their names here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rankzero.bounds import HEARTBEAT_INTERVAL
from rankzero.driver.failure import Failure, first_cause, name_ranks, same_as
from rankzero.errors import KILLED, LOST, MATCHED, PREEMPTED
from rankzero.job import Job
from rankzero.run.directory import RunStatus

STOP_MARGIN = 2.0
"""Seconds beyond the grace after which agents that do not say goodbye are cancelled at the engine, and again
after which the engine is given up."""

END_PATIENCE = 25.0
"""Seconds of silence after which agents are given up that were informed of the end: they run exit handlers, and
deliver log lines that still wait."""

AGENT_LOST_WINDOW = 2.0
"""Seconds to wait for the engine's own explanation when an agent's connection ended."""

STACKS_WINDOW = 3.0
"""Seconds to wait for the ranks' stacks once a run counts as hung."""

RESTART_DELAY_LIMIT = 60.0
"""Longest pause in seconds before a restart."""

MIN_CONNECT_TIMEOUT = 1.0
"""Seconds that an agent has at least to find its driver."""

GROWTH_PATIENCE = 30.0
"""Seconds without a new slot after which an elastic attempt starts with those that are there. As long as the last call
of torchrun's rendezvous. A quarter of ``start_timeout`` where that is less."""

WAITING_INTERVAL = 30.0
"""Seconds between two messages of what an attempt waits for."""

FAILURES_OF_A_BAD_HOST = 2
"""Failures of a host after which attempts leave it out, where the cluster has another."""


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


@dataclass(frozen=True)
class Start:
    """The state that a driver in its run's own stage begins with.

    Attributes:
        attempt: Its first attempt.
        budget: The restarts that are left.
    """

    attempt: int
    budget: Restarts


def spent(job: Job, status: RunStatus) -> Restarts:
    """Returns the budget of a submission whose driver was lost, less what that driver had used of it.

    Args:
        job: The job of the run.
        status: The last status that the lost driver wrote.
    """
    used = max(0, status.attempt - job.first_attempt)
    preemptions = min(used, status.preemptions)
    return Restarts(job.max_restarts, job.max_preemptions, used - preemptions, preemptions)


@dataclass(frozen=True)
class Placement:
    """With what an attempt starts.

    Attributes:
        num_tasks: Tasks that run ranks.
        spare: Tasks that are started beyond them: so many may come to lie on hosts that are left out.
        left_out: Those hosts.
    """

    num_tasks: int
    spare: int = 0
    left_out: frozenset[str] = frozenset()


def place(
    slots: int,
    least: int,
    most: int,
    unchanged: float,
    waited: float,
    bound: float,
    on_bad_hosts: Mapping[str, int] | None = None,
) -> Placement | None:
    """With what an attempt starts now; None to wait for more slots.

    A host that is to be left out is, where there are slots enough without it. An elastic attempt (``least < most``)
    waits for ``most`` while slots come, then takes what is there. It waits for half of the bound at most, since what is
    left is for the ranks to start.

    Args:
        slots: That there are.
        least: Tasks without which no attempt starts.
        most: Tasks of the largest world.
        unchanged: Seconds since the number of slots last changed.
        waited: Seconds since the attempt began.
        bound: Seconds within which its ranks must have started.
        on_bad_hosts: How many of the slots lie on each host that is to be left out.
    """
    bad = dict(on_bad_hosts or {})
    good = slots - sum(bad.values())
    usable, left_out = (good, bad) if good >= least else (slots, {})
    is_patient = unchanged < min(GROWTH_PATIENCE, bound / 4) and waited < bound / 2
    if usable < least or (usable < most and is_patient):
        return None
    return Placement(min(usable, most), sum(left_out.values()), frozenset(left_out))


def waiting_message(where: str, slots: int, least: int, most: int, waited: float, bound: float) -> str:
    """What an attempt waits for, for people: what is there, and what is missing."""
    needs = f"{least}" if least == most else f"{least} to {most}"
    missing = f"{least - slots} missing" if slots < least else f"{most - slots} more would be used"
    return (
        f"waiting for {where}: it offers {slots} of the {needs} task slots that this run needs at once ({missing}) "
        f"after {waited:.0f} s of start_timeout={bound:g} s"
    )


def starting_message(num_tasks: int, missing_tasks: Sequence[int], missing_ranks: Sequence[int]) -> str:
    """Why an attempt that was launched has not started yet, for people."""
    if missing_tasks:
        started = f"{num_tasks - len(missing_tasks)} of {num_tasks} tasks have started"
        return f"waiting: {started}, not {name_ranks(missing_tasks, 'task')} (are its slots in use?)"
    what = f"{name_ranks(missing_ranks)} to import torch" if missing_ranks else "rank 0 to open the rendezvous"
    return f"waiting for {what}; every task has started"


@dataclass(frozen=True)
class HostRecord:
    """How often each host was to blame for the end of an attempt."""

    failures: Mapping[str, int] = field(default_factory=dict)

    def after(self, host: str | None) -> HostRecord:
        """The record after an attempt that failed because of this host; None if no host is to blame."""
        return self if host is None else HostRecord({**self.failures, host: self.failures.get(host, 0) + 1})

    @property
    def bad(self) -> frozenset[str]:
        """The hosts to leave out."""
        return frozenset(host for host, count in self.failures.items() if count >= FAILURES_OF_A_BAD_HOST)


_BLAMED = (KILLED, LOST, MATCHED)


def host_to_blame(failures: Sequence[Failure], host_of: Callable[[int], str | None]) -> str | None:
    """The host whose fault the first cause may be; None if it is the code's, or the same happened on several hosts.

    Args:
        failures: What is known of each rank that failed.
        host_of: Gives the host of a rank, as the engine names it.
    """
    cause = first_cause(failures) if failures else None
    if cause is None or cause.collateral or cause.restart_cause not in _BLAMED:
        return None
    hosts = {host_of(rank) for rank in [cause.rank, *same_as(cause, failures)]}
    return hosts.pop() if len(hosts) == 1 else None


def connect_timeout(left: float) -> float:
    """Seconds for an agent to find its driver, of those that an attempt has left to start.

    A little less than all: an agent knows which addresses it tried and what came of that, its driver does not.
    """
    return max(MIN_CONNECT_TIMEOUT, left * 0.9)


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


def hang_message(why: str, stacks: Mapping[int, str], missing: Sequence[int], directory: str) -> str:
    """The text of a hang: who is missing, then where each rank stood, equal stacks once."""
    parts = [why]
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
