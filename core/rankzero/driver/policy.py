"""Pure decisions about a run, from facts to verdict, without a clock, a socket or a process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rankzero import bounds
from rankzero.errors import PREEMPTED

RESTART_PAUSE_MAX = bounds.scaled(60.0)  # Longest pause in seconds before a restart
GROWTH_TIMEOUT = bounds.scaled(30.0)  # Most seconds without a new slot until an elastic attempt starts
FAILURES_OF_A_BAD_HOST = 2  # Failures of one host after which the run's lines name it


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


def place(slots: int, least: int, most: int, unchanged: float, waited: float, bound: float) -> int | None:
    """Returns the number of tasks that an attempt starts with now; None to wait for more slots.

    An elastic attempt (``least < most``) waits for ``most`` while new slots appear, then starts with those that exist.
    It waits for half of the bound at most, within which its ranks must have started: they need the rest.

    Args:
        slots: Slots that exist.
        least: The smallest number of tasks with which an attempt starts.
        most: Tasks of the largest world.
        unchanged: Seconds since the number of slots last changed.
        waited: Seconds since the attempt began.
        bound: Seconds within which its ranks must have started.
    """
    may_grow = unchanged < min(GROWTH_TIMEOUT(), bound / 4) and waited < bound / 2
    return None if slots < least or (slots < most and may_grow) else min(slots, most)


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


def waiting_message(where: str, slots: int, least: int, most: int, waited: float, bound: float) -> str:
    """Returns the message about the slots that an attempt waits for: how many exist, and how many it needs."""
    needs = f"{least}" if least == most else f"{least} to {most}"
    offers = f"it offers {slots} of the {needs} task slots that this run needs at the same time"
    return f"waiting for {where}: {offers}, after {waited:.0f} s of start_timeout={bound:g} s"


def starting_message(num_tasks: int, missing_tasks: Sequence[int], missing_ranks: Sequence[int]) -> str:
    """Returns the message about why a launched attempt has not started yet."""
    if missing_tasks:
        started = f"{num_tasks - len(missing_tasks)} of {num_tasks} tasks have started"
        return f"{started}, not {name_ranks(missing_tasks, 'task')} (are its slots in use?)"
    what = f"{name_ranks(missing_ranks)} still imports torch" if missing_ranks else "rank 0 opens no rendezvous"
    return f"every task has started, but {what}"


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


def order_tasks(hosts: Sequence[str]) -> list[int]:
    """Returns the tasks in rank order: host by host, hosts in the order of their first task. Their index has a host."""
    first_seen = {host: index for index, host in reversed(list(enumerate(hosts)))}
    return sorted(range(len(hosts)), key=lambda task: (first_seen[hosts[task]], task))
