"""`Roster`: the agents of one attempt, their ranks, and which of them are lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rankzero.channel.messages import Join
from rankzero.driver import policy
from rankzero.errors import LOST
from rankzero.host.network import is_loopback


@dataclass
class Member:
    """An agent, as its driver knows it.

    Attributes:
        task: Number of its task.
        host: Name or address of its host, as the engine knows it.
        address: Address from which it connects to the driver.
        name: Name of its host, as the host itself reports it.
        python: Version of its Python.
        gpus: Addresses of the GPUs that its task was given.
        workers: Number of its ranks.
        torch: Version of torch in its ranks, once they are ready.
        first_rank: Its first rank; None until all agents have joined.
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
    torch: str = ""
    first_rank: int | None = None
    why_left: str | None = None
    restart_cause: str = LOST

    @property
    def ranks(self) -> range:
        """The ranks of this agent; empty before all agents have joined."""
        return range(self.first_rank, self.first_rank + self.workers) if self.first_rank is not None else range(0)

    def leave(self, why: str, restart_cause: str = LOST) -> None:
        """Records that the agent exited before it was asked to, or is lost; the first reason counts."""
        if self.why_left is None:
            self.why_left, self.restart_cause = why, restart_cause

    def why_unfit(self, python: str, use_gpu: bool) -> str | None:
        """Returns a message that says why the agent cannot run ranks of this job; None if it can.

        Args:
            python: ``major.minor`` of the Python that pickled the function.
            use_gpu: True if each rank needs a GPU.
        """
        if ".".join(self.python.split(".")[:2]) != python:
            return (
                f"the function was pickled by Python {python}, but task {self.task} on {self.name} "
                f"runs Python {self.python}: point spark.pyspark.python to a Python {python}"
            )
        if use_gpu and len(self.gpus) < self.workers:
            return (
                f"task {self.task} on {self.name} was given the GPUs {self.gpus} for "
                f"{self.workers} ranks; each rank needs one of its own"
            )
        return None


class Roster:
    """The agents of an attempt that have joined, are ready or are lost."""

    def __init__(self, num_agents: int, processes_per_task: int) -> None:
        """Creates a roster without members.

        Args:
            num_agents: Agents that run ranks.
            processes_per_task: Ranks of each task, used until ranks are numbered.
        """
        self.num_agents = num_agents
        self._processes_per_task = processes_per_task
        self._members: dict[int, Member] = {}
        self._ready: set[tuple[int, int]] = set()

    def join(self, task: int, message: Join) -> Member | None:
        """Adds a member and returns it; returns None if the task already has one, which then counts as lost.

        Only the driver decides about restarts, so ranks of two attempts never mix.
        """
        if task in self._members:
            self._members[task].leave("another agent joined in its place")
            return None
        place = message.host, message.address, message.hostname
        member = self._members[task] = Member(task, *place, message.python, message.gpus, message.workers)
        return member

    def get(self, task: int) -> Member | None:
        """Returns the member of a task; None if no agent has joined for it."""
        return self._members.get(task)

    @property
    def is_complete(self) -> bool:
        """True once all agents have joined."""
        return len(self._members) >= self.num_agents

    def number(self) -> list[Member]:
        """Numbers the ranks; returns the agents, host by host, each with its first rank."""
        members = [self._members[task] for task in sorted(self._members)]
        ordered = [members[index] for index in policy.order_tasks([member.host for member in members])]
        first_rank = 0
        for member in ordered:
            member.first_rank = first_rank
            first_rank += member.workers
        return ordered

    def host_of(self, rank: int) -> str | None:
        """Returns the host of a rank, as the engine names it; None before ranks are numbered."""
        return next((member.host for member in self._members.values() if rank in member.ranks), None)

    def numbered(self) -> list[Member]:
        """Returns the members that have ranks."""
        return [member for member in self._members.values() if member.first_rank is not None]

    def rank(self, member: Member, local_rank: int) -> int:
        """Returns the rank of a worker; before all agents have joined, the one it would have with tasks in order."""
        first = member.first_rank
        return (member.task * self._processes_per_task if first is None else first) + local_rank

    def note_ready(self, task: int, local_rank: int, torch: str = "") -> None:
        """Records that a worker has imported torch, and which version, and has its rank."""
        self._ready.add((task, local_rank))
        self._members[task].torch = torch

    def unlike_torch(self, submitted_with: str | None) -> str | None:
        """Returns a warning if versions of torch differ, ignoring builds (``+cpu``); None if they do not.

        Args:
            submitted_with: The submitter's version; None if it has no torch.
        """
        hosts: dict[str, list[str]] = {}
        for member in self.numbered():
            hosts.setdefault(member.torch.partition("+")[0], []).append(member.name)
        if len(hosts) > 1:
            found = "; ".join(f"{version} on {', '.join(sorted(set(names)))}" for version, names in hosts.items())
            return f"ranks have different versions of torch, which may be incompatible: {found}"
        own = (submitted_with or "").partition("+")[0]
        if own and hosts and own not in hosts:
            return (
                f"ranks have torch {next(iter(hosts))} and the job was submitted with {own}: values that one version "
                "pickles may not load in the other"
            )
        return None

    @property
    def num_ready(self) -> int:
        """Number of ranks that are ready."""
        return len(self._ready)

    def ranks_not_ready(self) -> list[int]:
        """Returns the ranks of joined agents that are not ready."""
        return [
            self.rank(member, local_rank)
            for member in self._members.values()
            for local_rank in range(member.workers)
            if (member.task, local_rank) not in self._ready
        ]

    def missing_tasks(self) -> list[int]:
        """Returns the tasks whose agents have not joined."""
        return [task for task in range(self.num_agents) if task not in self._members]

    def gone(self) -> list[Member]:
        """Returns the members that have exited before they were asked to, or are lost."""
        return [member for member in self._members.values() if member.why_left is not None]

    def is_on_one_host(self) -> bool:
        """Returns True if all members run on one host."""
        return len({member.name for member in self._members.values()}) == 1

    def rendezvous_hosts(self, member: Member) -> list[str]:
        """Returns the addresses under which all ranks may reach a member, the preferred one first."""
        hosts = list(dict.fromkeys([member.host, member.address]))
        if not self.is_on_one_host():
            # A loopback address means a different host on each host.
            hosts = [host for host in hosts if not is_loopback(host)] or hosts
        return hosts
