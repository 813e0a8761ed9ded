"""`Roster`: the agents of one attempt, which ranks are theirs, and who of them is still there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rankzero.channel.frames import Message
from rankzero.driver import policy
from rankzero.errors import LOST
from rankzero.host.network import is_loopback


@dataclass
class Member:
    """An agent, as its driver knows it.

    Attributes:
        task: Its number.
        host: The name or address under which its engine knows its host.
        address: The one from which it reaches the driver.
        name: What its host calls itself.
        python: Its Python's version.
        gpus: Addresses of the GPUs that its task was given.
        workers: Number of its ranks.
        torch: The version that its ranks have, once they are ready.
        first_rank: Of its ranks; None until all agents have joined.
        disconnected_at: Monotonic time since when its connection is broken; None if it is not.
        left_at: Monotonic time at which it left before it was asked to; None if it did not.
        why_left: The reason, in words.
        restart_cause: What a restart is decided by then.
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
    disconnected_at: float | None = None
    left_at: float | None = None
    why_left: str = ""
    restart_cause: str = LOST

    @property
    def ranks(self) -> range:
        """Its ranks; none before all agents have joined."""
        return range(self.first_rank, self.first_rank + self.workers) if self.first_rank is not None else range(0)

    @property
    def is_gone(self) -> bool:
        """True if it went, or its connection is broken."""
        return self.left_at is not None or self.disconnected_at is not None

    def leave(self, why: str, now: float, restart_cause: str = LOST) -> None:
        """Notes that it has left before it was asked to; the first reason counts."""
        if self.left_at is None:
            self.left_at, self.why_left, self.restart_cause = now, why, restart_cause

    def why_unfit(self, python: str, use_gpu: bool) -> str | None:
        """Why it cannot run ranks of this job, in words; None if it can.

        Args:
            python: ``major.minor`` of the Python that pickled the function.
            use_gpu: Each rank needs a GPU.
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
    """Who has joined, who is ready, who is lost."""

    def __init__(
        self, num_agents: int, processes_per_task: int, spare: int = 0, left_out: Collection[str] = ()
    ) -> None:
        """Nobody has joined.

        Args:
            num_agents: Agents that run ranks.
            processes_per_task: Ranks of each, as far as its number tells before ranks are numbered.
            spare: Agents that are started beyond them.
            left_out: Hosts whose agents run ranks only if there are not enough of others.
        """
        self.num_agents = num_agents
        self._spare = spare
        self._left_out = left_out
        self._is_chosen = False
        self._processes_per_task = processes_per_task
        self._members: dict[int, Member] = {}
        self._ready: set[tuple[int, int]] = set()

    def join(self, task: int, message: Message, now: float) -> Member | None:
        """The new member; None if the task has one already, which then counts as lost.

        Restarts are the driver's to decide: ranks of two tries must never mix.
        """
        if task in self._members:
            self._members[task].leave("another agent joined in its place", now)
            return None
        facts = {name: message[name] for name in ("host", "address", "python", "gpus", "workers")}
        member = self._members[task] = Member(task, name=str(message["hostname"]), **facts)
        return member

    def get(self, task: int) -> Member | None:
        """Who joined for a task; None if nobody did."""
        return self._members.get(task)

    @property
    def num_expected(self) -> int:
        """Agents that are started."""
        return self.num_agents + self._spare

    def choose(self) -> list[Member] | None:
        """Numbers the ranks, once, as soon as there are agents enough that are to run them.

        Returns:
            Those agents, host by host, each with its first rank; the others are no members any more. None if it is
            too early.
        """
        joined = [self._members[task] for task in sorted(self._members)]
        chosen = [member for member in joined if member.host not in self._left_out]
        if len(joined) == self.num_expected:
            chosen += [member for member in joined if member.host in self._left_out]
        if self._is_chosen or len(chosen) < self.num_agents:
            return None
        self._is_chosen = True
        chosen = sorted(chosen[: self.num_agents], key=lambda member: member.task)
        self._members = {member.task: member for member in chosen}
        self._ready = {(task, local_rank) for task, local_rank in self._ready if task in self._members}
        ordered = [chosen[index] for index in policy.order_tasks([member.host for member in chosen])]
        first_rank = 0
        for member in ordered:
            member.first_rank = first_rank
            first_rank += member.workers
        return ordered

    def is_surplus(self, task: int) -> bool:
        """True for a task that runs no ranks, since others were chosen."""
        return self._is_chosen and task not in self._members

    def host_of(self, rank: int) -> str | None:
        """The host of a rank, as its engine knows it; None before ranks are numbered."""
        return next((member.host for member in self._members.values() if rank in member.ranks), None)

    def numbered(self) -> list[Member]:
        """Those that have ranks."""
        return [member for member in self._members.values() if member.first_rank is not None]

    def rank(self, member: Member, local_rank: int) -> int:
        """The rank of a worker; before all have joined, the one it would have if tasks were in order."""
        first = member.first_rank
        return (member.task * self._processes_per_task if first is None else first) + local_rank

    def note_ready(self, task: int, local_rank: int, torch: str = "") -> None:
        """A worker has imported torch, of this version, and has its rank."""
        self._ready.add((task, local_rank))
        self._members[task].torch = torch

    def unlike_torch(self, submitted_with: str | None) -> str | None:
        """What to warn of if versions of torch differ; None if they do not. Builds (``+cpu``) do not count.

        Args:
            submitted_with: The submitter's version; None if it has no torch.
        """
        hosts: dict[str, list[str]] = {}
        for member in self.numbered():
            hosts.setdefault(member.torch.partition("+")[0], []).append(member.name)
        if len(hosts) > 1:
            found = "; ".join(f"{version} on {', '.join(sorted(set(names)))}" for version, names in hosts.items())
            return f"ranks have different versions of torch, which may not understand each other: {found}"
        own = (submitted_with or "").partition("+")[0]
        if own and hosts and own not in hosts:
            return (
                f"ranks have torch {next(iter(hosts))} and the job was submitted with {own}: what one has pickled "
                "the other may not load"
            )
        return None

    @property
    def num_ready(self) -> int:
        """Number of the ranks that are ready."""
        return len(self._ready)

    def ranks_not_ready(self) -> list[int]:
        """The ranks of those that have joined which are not ready."""
        return [
            self.rank(member, local_rank)
            for member in self._members.values()
            for local_rank in range(member.workers)
            if (member.task, local_rank) not in self._ready
        ]

    def missing_tasks(self) -> list[int]:
        """The tasks whose agents have not joined."""
        if self._is_chosen:
            return []
        return [task for task in range(self.num_expected) if task not in self._members]

    def gone(self) -> list[Member]:
        """Those that went, or whose connection is broken."""
        return [member for member in self._members.values() if member.is_gone]

    def is_on_one_host(self) -> bool:
        """True if all members are."""
        return len({member.name for member in self._members.values()}) == 1

    def rendezvous_hosts(self, member: Member) -> list[str]:
        """Where the ranks of all hosts may reach a member's, the best first."""
        hosts = list(dict.fromkeys([member.host, member.address]))
        if not self.is_on_one_host():
            # A loopback address stands for another host on every other one.
            hosts = [host for host in hosts if not is_loopback(host)] or hosts
        return hosts
