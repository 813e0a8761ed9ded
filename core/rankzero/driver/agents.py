"""`Agents`: the agents of one attempt, their ranks, and what they report."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rankzero import bounds
from rankzero.bounds import HEARTBEAT_INTERVAL, LOG_TAIL_WIDTH
from rankzero.channel import messages
from rankzero.channel.messages import Message
from rankzero.channel.server import Server
from rankzero.driver.ending import Facts, Failure, Member
from rankzero.driver.places import Places
from rankzero.driver.storage import Storage
from rankzero.driver.watch import HangWatch
from rankzero.errors import EngineError
from rankzero.job import Job
from rankzero.run.checkpoints import Manifest

if TYPE_CHECKING:
    import ssl


class Agents:
    """The agents of an attempt; notes what they report, and wakes the coroutine of the run if that may decide.

    Attributes:
        members: The agents that have joined, by task.
        is_bound, has_begun: True once rank 0 has bound the port at which the ranks meet, and once a rank has entered.
        served: Locations of the files that agents may fetch, by name.
        heard_at: Monotonic time of the last message that shows that ranks or their agents still work.
        is_stopping: True once the agents were asked to stop before the training had succeeded.
        is_leaving: True once the agents were asked to exit, for any reason.
    """

    def __init__(
        self,
        places: Places,
        job: Job,
        number: int,
        num_agents: int,
        storage: Storage,
        secret: str,
        tls: ssl.SSLContext | None,
    ) -> None:
        """Prepares for agents, of which none has joined. Without ``tls``, connections are not encrypted."""
        self._own, self._recorder, self._watch = places.own, places.recorder, places.watch
        self._job = job
        self._number = number
        self._storage = storage
        self.num_agents = num_agents
        self.members: dict[int, Member] = {}
        self.facts: Facts = storage.facts
        self.hangs = HangWatch(self.facts)
        self.is_bound = self.has_begun = self.is_stopping = self.is_leaving = self._one_host = False
        self.heard_at = time.monotonic()
        self.served = {name: file["location"] for name, file in job.files.items()}
        executed = {"payload.pkl", "modules.zip", "code.zip"} & job.files.keys()
        digests = {name: job.files[name]["digest"] for name in executed}
        self.server = Server(secret, self.on_message, self.on_end, self.served, digests, storage.directory, tls)

    # -- who has joined ------------------------------------------------------------------------

    def gone(self) -> list[Member]:
        """Returns the agents that have exited before they were asked to, or are lost."""
        return [member for member in self.members.values() if member.why_left is not None]

    def missing(self) -> tuple[list[int], list[int]]:
        """Returns the tasks whose agents have not joined, and the ranks of the others that have not imported torch."""
        members = self.members.values()
        ranks = [member.first_rank + local for member in members for local in set(range(member.workers)) - member.ready]
        return [task for task in range(self.num_agents) if task not in self.members], sorted(ranks)

    # -- what the attempt sends ----------------------------------------------------------------

    def assign_ranks(self, resume: Manifest | None, token: str) -> None:
        """Numbers the ranks host by host, and gives each agent what it needs to start its own.

        An agent recognizes the submission's folder by the token.
        """
        job, members = self._job, [self.members[task] for task in sorted(self.members)]
        members = [members[index] for index in order_tasks([member.host for member in members])]
        self._one_host = len({member.name for member in members}) == 1
        # Computed once: computing it for each agent would be quadratic in their number.
        same: dict[str, Any] = {
            "master_addr": members[0].addresses(for_one_host=self._one_host)[0],
            "ports": job.ports,
            "run_directory": self._own.directory,
            "run_token": token,
            "files": job.files,
            # Short enough to notice a hang in time.
            "beat_interval": min(HEARTBEAT_INTERVAL, (job.hang_timeout or math.inf) / 5),
            "context": {
                "world_size": job.num_processes,
                "run_id": job.run_id,
                "storage_path": self._own.run.directory,
                "attempt": self._number,
                "backend": ("nccl" if job.use_gpu else "gloo") if job.backend == "auto" else job.backend,
                "labels": job.labels,
            },
        }
        sampled: set[str] = set()
        first_rank = 0
        for node_rank, member in enumerate(members):
            member.first_rank = first_rank
            first_rank += member.workers
            # One agent of each host samples the host's use of CPU, memory and GPUs.
            assign = messages.Assign(
                **same,
                first_rank=member.first_rank,
                node_rank=node_rank,
                sample_usage=member.host not in sampled,
                checkpoint=resume.for_ranks(member.ranks) if resume else None,
            )
            sampled.add(member.host)
            self.server.send(member.task, assign)

    def note_stored(self) -> None:
        """Notifies the ranks of each checkpoint that was committed or is lost, and notes the end of rank 0's value."""
        for settled in self._storage.settled():
            if isinstance(settled, int):
                self.server.broadcast(messages.Lost(settled))
                continue
            self._recorder.event({"type": "checkpoint", "id": settled.id, "metrics": settled.metrics})
            self._recorder.update(checkpoint=settled.id)
            for member in self.members.values():
                self.server.send(member.task, messages.Committed(settled.for_ranks(member.ranks)))

    async def request_stacks(self, is_over: Callable[[], bool], *, quiet: bool = False) -> None:
        """Requests the stacks of all ranks, and waits for those that arrive in time, or until ``is_over``.

        The logs of the ranks show them, unless the request is ``quiet``.
        """
        deadline = time.monotonic() + bounds.STACKS_WINDOW()
        self.hangs.stacks.clear()
        self.server.broadcast(messages.Dump(quiet))
        while not is_over() and (left := deadline - time.monotonic()) > 0:
            if len(self.hangs.stacks.keys() | self.facts.over) >= self._job.num_processes:
                return
            await self._watch.wait(min(left, bounds.POLL_INTERVAL))

    # -- what the engine and the channel report --------------------------------------------------

    async def note_engine_end(self, error: BaseException | None) -> None:
        """Notes that the engine reports the end of all agents, with its error if there is one."""
        # Messages that arrived before the end explain it.
        await self.server.read_rest()
        self.facts.engine_ended, self.facts.engine_error = True, error
        self._watch.wake()

    def on_end(self, task: int, why: str | None) -> None:
        """Notes that an agent has disconnected; without being asked to, it is lost."""
        member = self.members.get(task)
        if member and not self.is_leaving:
            member.leave(why or "it has exited early")
        if member and why:
            self.facts.over.update(member.ranks)
        self._watch.wake()

    def on_message(self, task: int, local_rank: int | None, message: Message) -> None:
        """Applies a message of an agent or of one of its ranks."""
        if isinstance(message, messages.Join):
            self._on_join(task, message)
        elif (member := self.members.get(task)) is None:
            return
        elif isinstance(message, messages.Usage):
            self._recorder.event({"type": "usage", **message.sample, "host": member.name})
        elif isinstance(message, messages.Leaving):
            member.leave(message.why, message.cause)
        elif local_rank is not None:
            self._on_rank(member.first_rank + local_rank, local_rank, member, message)
        if not isinstance(message, messages.Usage):
            self.heard_at = time.monotonic()
        if not isinstance(message, (messages.Usage, messages.Log, messages.Metrics, messages.Beat)):
            self._watch.wake()

    def _on_join(self, task: int, message: messages.Join) -> None:
        if task in self.members:
            # The first one is lost. Only the driver decides about restarts, so ranks of two attempts never mix.
            return
        place = message.host, message.address, message.hostname
        first = task * self._job.processes_per_task
        member = Member(task, *place, message.python, message.gpus, message.workers, first)
        self.members[task] = member
        if self.is_stopping:
            self.server.send(task, messages.Stop(grace=0.0))
        elif why := member.why_unfit(self._job.python, self._job.use_gpu):
            self.facts.refusal = EngineError(why)

    def _on_rank(self, rank: int, local_rank: int, member: Member, message: Message) -> None:
        match message:
            case messages.Log():
                self._recorder.log(rank, message.lines)
            case messages.Metrics():
                self._recorder.metrics(rank, message.rows)
            case messages.Beat():
                self.hangs.on_beat(rank, message.progress, time.monotonic())
            case messages.Stack():
                self.hangs.stacks[rank] = message
            case messages.Reached("ready"):
                member.ready.add(local_rank)
            case messages.Reached("bound"):
                self.is_bound, hosts = True, member.addresses(for_one_host=self._one_host)
                self.server.broadcast(messages.Go(hosts, message.values["port"], self._one_host))
            case messages.Part():
                self._storage.add_part(rank, message)
            case messages.Lost():
                self._storage.lose(message.index)
            case messages.Damaged():
                self._storage.mark_damaged(message.id)
            case messages.Reached("returned") if member.why_left is not None or self.is_stopping:
                # It may have returned because it was asked to stop.
                pass
            case messages.Reached("entered" | "returned" as phase):
                if phase == "returned":
                    self.hangs.on_return(rank, time.monotonic())
                else:
                    self.has_begun = True
                    self.hangs.on_beat(rank, 0, time.monotonic())
                of_rank = {"type": phase, "rank": rank, "attempt": self._number, "host": member.name}
                self._recorder.event({**message.values, **of_rank})
            case messages.Finished() if rank in self.facts.returned:
                self.facts.over.add(rank)
                self._storage.finish(rank, message, self._recorder.status.metrics)
            case messages.Finished():
                # The rank exited cleanly because it was asked to: the training was stopped, not finished.
                what = "ended when it was asked to"
                self._on_failure(rank, member, messages.Failed(message.time, None, what, exit_code=0, collateral=True))
            case messages.Failed():
                self._on_failure(rank, member, message)
            case messages.Reached("exited"):
                self.facts.over.add(rank)

    def _on_failure(self, rank: int, member: Member, message: messages.Failed) -> None:
        found = {**vars(message), "log_tail": [line[:LOG_TAIL_WIDTH] for line in message.log_tail]}
        # The agent has asked the rank to exit, which may have made it raise.
        found["collateral"] = message.collateral or member.why_left is not None
        report = dataclasses.replace(message, **self._recorder.mask.facts(found))
        failure = Failure(rank, member.name, member.host, report)
        if self.facts.note_failure(failure):
            self._recorder.event({"type": "failure", "rank": rank, "host": failure.host, "what": failure.headline})


def order_tasks(hosts: Sequence[str]) -> list[int]:
    """Returns the tasks in rank order: host by host, hosts in the order of their first task. Their index has a host."""
    first_seen = {host: index for index, host in reversed(list(enumerate(hosts)))}
    return sorted(range(len(hosts)), key=lambda task: (first_seen[hosts[task]], task))
