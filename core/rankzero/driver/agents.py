"""`Agents`: the agents of one attempt, and what they and their ranks report."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankzero import bounds
from rankzero.bounds import LOG_TAIL_WIDTH
from rankzero.channel import messages
from rankzero.channel.messages import Message
from rankzero.channel.server import Server
from rankzero.driver import policy
from rankzero.driver.ending import Facts, Failure
from rankzero.driver.hangs import HangWatch
from rankzero.driver.places import Places
from rankzero.driver.recorder import Recorder
from rankzero.driver.roster import Member, Roster
from rankzero.driver.storage import Storage
from rankzero.driver.watch import Inbox, Watch
from rankzero.errors import EngineError
from rankzero.job import Job
from rankzero.run.checkpoints import FOLDER, Manifest, mark_damaged
from rankzero.run.directory import Submission

if TYPE_CHECKING:
    import ssl

EXECUTED = ("payload.pkl", "modules.zip", "code.zip")
"""Names of the files that ranks execute."""


@dataclass(frozen=True)
class Run:
    """The parts of a driver that all attempts of its run share.

    Attributes:
        own: The submission.
        places: Has the engine's session.
        recorder: Writes the run directory.
        inbox: Wakes the coroutine of the run.
        watch: Watches for what ends a run from outside.
        env: The user's environment for the ranks.
    """

    own: Submission
    places: Places
    recorder: Recorder
    inbox: Inbox
    watch: Watch
    env: dict[str, str]


class Agents:
    """Notes what the agents report, and wakes the coroutine of the run if that may decide about the attempt.

    Attributes:
        server: The channel to the agents.
        roster: The agents that have joined.
        facts: The facts on which the end of the attempt depends.
        hangs: The progress and the stacks of ranks.
        has_rendezvous: True once rank 0 has bound the port at which the ranks meet.
        served: Locations of the files that agents may fetch, by name.
        heard_at: Monotonic time of the last message that shows that ranks or their agents still work.
        is_stopping: True once the agents were asked to stop before the training had succeeded.
        is_leaving: True once the agents were asked to exit, for any reason.
    """

    def __init__(
        self,
        run: Run,
        job: Job,
        number: int,
        num_agents: int,
        storage: Storage,
        secret: str,
        tls: ssl.SSLContext | None,
    ) -> None:
        """Prepares for agents, of which none has joined.

        Args:
            run: The parts that all attempts share.
            job: The job, for the size of this attempt's world.
            number: Number of the attempt.
            num_agents: Number of agents.
            storage: Has the facts, and stores what ranks send.
            secret: The attempt's secret.
            tls: Context for encrypted connections; None for plain ones.
        """
        self._own, self._recorder, self._inbox = run.own, run.recorder, run.inbox
        self.room = run.recorder.room
        self._job = job
        self._number = number
        self._committer = storage.committer
        self._storage = storage
        self.roster = Roster(num_agents, job.processes_per_task)
        self.facts: Facts = storage.facts
        self.hangs = HangWatch(job.num_processes)
        self.has_rendezvous = self.is_stopping = self.is_leaving = False
        self._rendezvous: tuple[Member, int] | None = None
        self._resume: Manifest | None = None
        self.heard_at = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []
        self.served = {name: file["location"] for name, file in job.files.items()}
        digests = {name: job.files[name]["digest"] for name in EXECUTED if name in job.files}
        self.server = Server(secret, self, served=self.served, digests=digests, directory=storage.directory, tls=tls)
        storage.received = self.server.received

    # -- what the attempt sends ----------------------------------------------------------------

    def assign_ranks(self, resume: Manifest | None, token: str) -> None:
        """Numbers the ranks, and gives each agent what it needs to start its own.

        Args:
            resume: The checkpoint that the ranks start from; None without one.
            token: Text by which an agent recognizes the submission's folder.
        """
        self._resume, members = resume, self.roster.number()
        # Computed once: computing it for each agent would be quadratic in their number.
        same: dict[str, Any] = {
            "master_addr": self.roster.rendezvous_hosts(members[0])[0],
            "run_directory": self._own.directory,
            "run_token": token,
            "files": self._job.files,
            "beat_interval": policy.beat_interval(self._job.hang_timeout),
            "context": {
                "world_size": self._job.num_processes,
                "run_id": self._job.run_id,
                "storage_path": self._own.run.directory,
                "attempt": self._number,
                "backend": self._job.resolved_backend(),
                "labels": self._job.labels,
            },
        }
        sampled: set[str] = set()
        for node_rank, member in enumerate(members):
            assert member.first_rank is not None
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

    def send_rendezvous(self) -> None:
        """Sends the addresses and the port of rank 0 to all ranks. Requires `has_rendezvous`."""
        assert self._rendezvous is not None
        member, port = self._rendezvous
        hosts, one_host = self.roster.rendezvous_hosts(member), self.roster.is_on_one_host()
        self.server.broadcast(messages.Go(hosts, port, one_host))

    def send_settled(self, settled: Manifest | int) -> None:
        """Notifies the ranks of a checkpoint that was committed, or that is lost."""
        if isinstance(settled, int):
            self.server.broadcast(messages.Lost(settled))
            return
        self._recorder.event({"type": "checkpoint", "id": settled.id, "metrics": settled.metrics})
        self._recorder.update(checkpoint=settled.id)
        for member in self.roster.numbered():
            self.server.send(member.task, messages.Committed(settled.for_ranks(member.ranks)))

    async def request_stacks(self, is_over: Callable[[], bool], *, quiet: bool = False) -> None:
        """Requests the stacks of all ranks that may reply, and waits for those that arrive in time.

        Args:
            is_over: Ends the wait once it returns True.
            quiet: True if the logs of the ranks should not show their stacks.
        """
        deadline = time.monotonic() + bounds.STACKS_WINDOW()
        self.hangs.stacks.clear()
        self.server.broadcast(messages.Dump(quiet))
        while not is_over() and (left := deadline - time.monotonic()) > 0:
            if len(self.hangs.stacks.keys() | self.facts.over) >= self._job.num_processes:
                return
            await self._inbox.wait(min(left, bounds.POLL_INTERVAL))

    # -- what the engine and the channel call ---------------------------------------------------------------

    def engine_end(self) -> Callable[[BaseException | None], None]:
        """Returns the function that the engine's thread calls when all agents have ended."""
        loop = asyncio.get_running_loop()

        async def note(error: BaseException | None) -> None:
            # Messages that arrived before the end explain it.
            await self.server.read_rest()
            self.facts.engine_ended, self.facts.engine_error = True, error
            self._inbox.change()

        def on_end(error: BaseException | None) -> None:
            # The loop is closed if the driver has not waited for the end.
            if not loop.is_closed():
                loop.call_soon_threadsafe(lambda: self._tasks.append(loop.create_task(note(error))))

        return on_end

    async def close(self) -> None:
        """Disconnects all agents that are left."""
        await self.server.close()
        for task in self._tasks:
            task.cancel()

    def on_end(self, task: int, why: str | None) -> None:
        """Notes that an agent has disconnected; without being asked to, it is lost."""
        member = self.roster.get(task)
        if member and not self.is_leaving:
            member.leave(why or "it has exited early")
        if member and why:
            self.facts.over.update(member.ranks)
        self._inbox.change()

    def on_message(self, task: int, local_rank: int | None, message: Message) -> None:
        """Applies a message of an agent or of one of its ranks."""
        if isinstance(message, messages.Join):
            self._on_join(task, message)
        elif (member := self.roster.get(task)) is None:
            return
        elif local_rank is None:
            self._on_agent(member, message)
        else:
            self._on_rank(self.roster.rank(member, local_rank), local_rank, member, message)
        if not isinstance(message, messages.Usage):
            self.heard_at = time.monotonic()
        if not isinstance(message, (messages.Usage, messages.Log, messages.Metrics, messages.Beat)):
            self._inbox.change()

    def _on_join(self, task: int, message: messages.Join) -> None:
        member = self.roster.join(task, message)
        if member is None:
            return
        if self.is_stopping:
            self.server.send(task, messages.Stop(grace=0.0))
        elif why := member.why_unfit(self._job.python, self._job.use_gpu):
            self.facts.refusal = EngineError(why)

    def _on_agent(self, member: Member, message: Message) -> None:
        match message:
            case messages.Usage():
                self._recorder.event({"type": "usage", **message.sample, "host": member.name})
            case messages.Leaving():
                member.leave(message.why, message.cause)

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
                self.roster.note_ready(member.task, local_rank)
            case messages.Rendezvous():
                self._rendezvous, self.has_rendezvous = (member, message.port), True
            case messages.Part():
                self._storage.add_part(rank, message)
            case messages.Lost():
                self._committer.lose(message.index)
            case messages.Damaged():
                found = self._resume
                own = self._own.path(FOLDER, message.id)
                folder = found.folder if found and found.id == message.id else own
                self._committer.do(functools.partial(mark_damaged, folder), as_owner=True)
            case messages.Reached("entered"):
                self._note_phase(rank, member, message)
            case messages.Reached("returned") if member.why_left is None and not self.is_stopping:
                self.facts.returned.add(rank)
                self.hangs.on_return(rank, time.monotonic())
                self._note_phase(rank, member, message)
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

    def _note_phase(self, rank: int, member: Member, message: messages.Reached) -> None:
        """Records when a rank reached a phase, for the report of the run."""
        of_rank = {"type": message.phase, "rank": rank, "attempt": self._number, "host": member.name}
        self._recorder.event({**message.values, **of_rank})

    def _on_failure(self, rank: int, member: Member, message: messages.Failed) -> None:
        found = {**vars(message), "log_tail": [line[:LOG_TAIL_WIDTH] for line in message.log_tail]}
        # The agent has asked the rank to exit, which may have made it raise.
        found["collateral"] = message.collateral or member.why_left is not None
        report = dataclasses.replace(message, **self._recorder.mask.facts(found))
        placed_on = member.host if member.ranks else None
        failure = Failure(rank, member.name, report, placed_on, len(self.facts.failures))
        if self.facts.note_failure(failure):
            self._recorder.event({"type": "failure", "rank": rank, "host": failure.host, "what": failure.headline})
