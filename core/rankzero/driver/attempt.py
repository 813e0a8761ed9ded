"""`Attempt`: one attempt of a run, from the start of its agents. It applies their messages in every state."""

from __future__ import annotations

import base64
import functools
import logging
import time
from concurrent.futures import Future
from typing import Any

from rankzero import bounds, store
from rankzero.bounds import LOG_TAIL_WIDTH, STORE_OUTAGE
from rankzero.channel import messages
from rankzero.channel.auth import new_secret
from rankzero.channel.messages import Message, encode
from rankzero.channel.server import ChannelServer
from rankzero.driver import ending, policy
from rankzero.driver.commits import Committer, NotOwnerError
from rankzero.driver.ending import Facts, Failure, Verdict
from rankzero.driver.hangs import HangWatch, RemainingWatch
from rankzero.driver.places import Placed
from rankzero.driver.recorder import Recorder
from rankzero.driver.roster import Member, Roster
from rankzero.driver.storage import Scratch, Storage, files_of, remove_leftovers
from rankzero.driver.watch import Mailbox, Received, Watch
from rankzero.engines.base import EngineSession, within
from rankzero.errors import EngineError, RunTimeoutError, StartTimeoutError
from rankzero.host.network import listen
from rankzero.host.processes import caller_process
from rankzero.job import CheckpointConfig
from rankzero.run.checkpoints import FOLDER, Manifest, mark_damaged
from rankzero.run.directory import Submission

logger = logging.getLogger(__name__)


class Attempt:
    """The agents of one attempt and what they have reported. `rankzero.driver.states` decides when it has ended.

    Attributes:
        job: The job, for the size of this attempt's world.
        facts: The facts on which the end depends.
        start_deadline: Monotonic time by which every rank must have started.
        started_at: Monotonic time at which every rank had started; None before.
        resume: The checkpoint that the ranks start from; None without one.
    """

    def __init__(
        self,
        own: Submission,
        number: int,
        placed: Placed,
        recorder: Recorder,
        mailbox: Mailbox,
        watch: Watch,
        env: dict[str, str],
        run_started_at: float | None,
    ) -> None:
        """Starts the agents of the attempt.

        Args:
            own: The submission.
            number: Number of the attempt.
            placed: The job, and the slots for its tasks.
            recorder: Writes the run directory.
            mailbox: Receives the messages of the agents.
            watch: Watches for what ends a run from outside.
            env: The user's environment for the ranks.
            run_started_at: Monotonic time at which every rank of the first attempt that started had started; None if no
                attempt has. The run's ``timeout`` counts from there.
        """
        self._own = own
        session = placed.session
        self.job = job = placed.plan.job.sized(placed.num_tasks)
        self._number = number
        self._recorder = recorder
        self.mailbox = mailbox
        self.watch = watch
        self._run_started_at = run_started_at
        self.start_deadline = placed.plan.deadline
        self.started_at: float | None = None
        self._roster = Roster(session.num_agents(placed.num_tasks), job.processes_per_task)
        self.facts = Facts(job.num_processes, own.run.directory)
        self._has_rendezvous = False
        self._hang = HangWatch(job.num_processes, self.broadcast, self._roster.disconnected)
        self._remaining = RemainingWatch(job.num_processes, self.broadcast)
        self._ended: Future[BaseException | None] = Future()
        self._ended.add_done_callback(mailbox.wake)
        encrypts = job.encrypts(by_default=session.encrypts)
        identity = None
        if encrypts:
            # Imported here, so that most drivers do not load TLS.
            from rankzero.channel.tls import make_identity

            identity = make_identity()
            logger.info("the connections of attempt %s are encrypted", number)
        kept = CheckpointConfig(**job.checkpoints)
        self.committer = Committer(own, number, job.num_processes, kept, mailbox.wake)
        self.storage = Storage(own, number, self.committer, self.facts)
        self._scratch = Scratch() if own.is_remote else None
        try:
            began = time.monotonic()
            self.resume, self._token = store.patiently(
                self._read_store, STORE_OUTAGE(), bounds.STORE_RETRY_INTERVAL(), self._gives_up
            )
            # An outage of the store takes no time from the ranks' start.
            self.start_deadline += time.monotonic() - began
            secret = new_secret()
            self._server = ChannelServer(
                secret,
                mailbox.put,
                served={name: file["location"] for name, file in job.files.items()} | files_of(self.resume),
                upload_directory=self._scratch.path if self._scratch else own.path("result"),
                can_take=mailbox.has_room,
                identity=identity,
            )
        except BaseException:
            self._close_storage()
            raise
        try:
            config = {
                **policy.agent_config(job, number, env, self.start_deadline - time.monotonic()),
                "driver": [session.driver_hosts, self._listen(session)],
                "secret": secret,
                "caller": caller_process(),
                "certificate": base64.b64encode(identity.certificate).decode() if identity else None,
            }
            recorder.note_places(job.num_processes, held=True)
            self._group = session.launch(placed.num_tasks, config, self._on_engine_end)
        except BaseException:
            self.close()
            raise

    def _listen(self, session: EngineSession) -> int:
        try:
            return self._server.start(listen(session.bind_host, self.job.ports))
        except OSError as error:
            raise EngineError(f"the driver cannot listen for the agents: {error}") from error

    def close(self) -> None:
        """Disconnects the agents and releases what the attempt has opened."""
        self._recorder.note_places(self.job.num_processes, held=False)
        self._server.close()
        self._close_storage()

    def _close_storage(self) -> None:
        self.committer.close(0.0)
        if self._scratch:
            self._scratch.remove()

    def _read_store(self) -> tuple[Manifest | None, str]:
        """Returns the checkpoint to start from and the token; removes what earlier attempts left. May be repeated."""
        resume = self.committer.newest()
        remove_leftovers(self._own, range(self.job.first_attempt, self._number))
        return resume, self._own.token()

    def _gives_up(self, error: Exception) -> bool:
        """Returns True for an error that no repetition corrects; raises RunCancelledError if the run must end."""
        self.watch.check()
        return isinstance(error, NotOwnerError)

    def broadcast(self, message: Message) -> None:
        """Sends a message to every agent that has joined."""
        self._server.broadcast(encode(message))

    def poll(self) -> None:
        """Applies the work that other threads have completed: commits, the stored value, the end of the agents."""
        for settled in self.committer.settled():
            self._on_settled(settled)
        self.storage.poll()
        if (failure := self._server.failure) and not self.facts.refusal:
            self.facts.refusal = EngineError(f"the driver's channel failed: {type(failure).__name__}: {failure}")
        if self._ended.done() and self.mailbox.is_empty:
            self.facts.engine_ended, self.facts.engine_error = True, self._ended.result()

    def _on_engine_end(self, error: BaseException | None) -> None:
        # Messages that arrived before the end explain it; the driver may have stood still and not have read them.
        self._server.when_alone(functools.partial(self._ended.set_result, error))

    def _on_settled(self, settled: Manifest | int) -> None:
        if isinstance(settled, int):
            self.broadcast(messages.NotCommitted(settled))
            return
        self._recorder.event({"type": "checkpoint", "id": settled.id, "metrics": settled.metrics})
        self._recorder.update(checkpoint=settled.id)
        for member in self._roster.numbered():
            self._server.send(member.task, encode(messages.Committed(settled.for_ranks(member.ranks))))

    def judge(self, now: float) -> Verdict | None:
        """Returns how the attempt has ended; None while it may still succeed."""
        stacks = functools.partial(self._hang.poll, now, float("-inf"))
        return ending.judge(self.facts, self._roster.gone(), now, self._group.explain, self._recorder.tail, stacks)

    def settled(self, verdict: Verdict) -> Verdict:
        """Returns the verdict, corrected by what was stored or reported while the ranks were stopped."""
        return ending.settled(verdict, self.facts, self._recorder.tail)

    def check(self, now: float) -> None:
        """Raises the typed error if the run must end: on request, or because it takes too long."""
        self.watch.check()
        timeout, began = self.job.timeout, self._run_started_at or self.started_at
        if timeout and began is not None and now - began > timeout:
            raise RunTimeoutError(f"the run took longer than timeout={timeout} s and was ended")

    def check_hangs(self, now: float) -> None:
        """Raises HangError if the ranks wait for each other and always will. After a failure `judge` has the stacks."""
        if self.facts.failures:
            return
        if what := self._remaining.poll(now, self.facts.returned, self._hang.progress_at):
            self._recorder.announce("waiting", what)
        if self._remaining.is_hung(now):
            if stacks := self._hang.poll(now, 0.0):
                raise ending.left_waiting(self.facts.returned, stacks, self._own.run.directory)
        elif (bound := self.job.hang_timeout) is not None and (stacks := self._hang.poll(now, bound, self.facts.over)):
            raise ending.hung(bound, stacks, self._hang.silent, self._own.run.directory)

    @property
    def has_started(self) -> bool:
        """True once every rank has imported torch and rank 0 has opened the rendezvous."""
        return self._has_rendezvous and self._roster.num_ready == self.job.num_processes

    @property
    def is_undisturbed(self) -> bool:
        """True while no rank has returned or failed and every agent is connected, so nothing awaits the next tick."""
        return not (self.facts.returned or self.facts.over or self.facts.refusal or self._roster.gone())

    def note_start(self) -> None:
        """Records that every rank has started."""
        self.started_at = time.monotonic()
        self._recorder.update(state="running", phase="running", started=self._recorder.status.started or time.time())
        if what := self._roster.unlike_torch(self.job.torch):
            self._recorder.announce("versions", what)
        self._group.tolerate_outage()

    def report_waiting(self) -> None:
        """Records which tasks or ranks have not started yet, where followers of the run see it."""
        tasks, ranks = self._roster.missing_tasks(), self._roster.ranks_not_ready()
        self._recorder.announce("waiting", policy.starting_message(self._roster.num_agents, tasks, ranks))

    def start_timeout(self) -> StartTimeoutError:
        """Returns the error of an attempt whose ranks have not started in time."""
        missing, ranks = self._roster.missing_tasks(), self._roster.ranks_not_ready()
        return ending.start_timeout(self.job.start_timeout, self._roster.num_agents, missing, ranks)

    def record(self, verdict: Verdict) -> Future[None]:
        """Writes the success; returns a future that completes when it is durable."""
        assert verdict.success is not None
        recorded = self._recorder.commit(*verdict.success)
        recorded.add_done_callback(self.mailbox.wake)
        return recorded

    def cancel(self) -> None:
        """Ends the agents without their cooperation."""
        logger.warning("agents did not end in time; cancelling them at the engine")
        within(bounds.STOP_MARGIN(), self._group.cancel)
        self._server.close()
        self._group.wait(bounds.STOP_MARGIN())

    # -- messages ------------------------------------------------------------------------------

    def on(self, received: Received, *, is_stopping: bool = False) -> None:
        """Applies a message of an agent or of one of its ranks.

        Args:
            received: The message and its sender.
            is_stopping: True if the agents were asked to stop before the training had succeeded.
        """
        task, local_rank, message = received
        if isinstance(message, messages.Join):
            self._on_join(task, message, is_stopping=is_stopping)
        elif (member := self._roster.get(task)) is None:
            return
        elif local_rank is None:
            self._on_agent(member, message)
        elif not (is_stopping and isinstance(message, messages.Returned)):
            self._on_rank(self._roster.rank(member, local_rank), local_rank, member, message)

    def _on_join(self, task: int, message: messages.Join, *, is_stopping: bool) -> None:
        member = self._roster.join(task, message, time.monotonic())
        if member is None:
            return
        if is_stopping:
            self._dismiss(task)
        elif why := member.why_unfit(self.job.python, self.job.use_gpu):
            self.facts.refusal = EngineError(why)
        elif chosen := self._roster.choose():
            self._assign_ranks(chosen)

    def _dismiss(self, task: int) -> None:
        self._server.send(task, encode(messages.Stop(grace=0.0)))

    def _assign_ranks(self, members: list[Member]) -> None:
        # Computed once: computing it for each agent would be quadratic in their number.
        same: dict[str, Any] = {
            "master_addr": self._roster.rendezvous_hosts(members[0])[0],
            "run_directory": self._own.directory,
            "run_token": self._token,
            "files": self.job.files,
            "beat_interval": policy.beat_interval(self.job.hang_timeout),
            "context": {
                "world_size": self.job.num_processes,
                "run_id": self.job.run_id,
                "storage_path": self._own.run.directory,
                "attempt": self._number,
                "backend": self.job.resolved_backend(),
                "labels": self.job.labels,
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
                checkpoint=self.resume.for_ranks(member.ranks) if self.resume else None,
            )
            sampled.add(member.host)
            self._server.send(member.task, encode(assign))

    def _on_agent(self, member: Member, message: Message) -> None:
        match message:
            case messages.Uploaded():
                self.storage.note_upload(member.task, message)
            case messages.Usage():
                self._recorder.event({"type": message.kind, **message.sample, "host": member.name})
            case messages.Leaving():
                member.leave(message.why, time.monotonic(), message.cause)
            case messages.Disconnected():
                member.disconnected_at = time.monotonic()
            case messages.Reconnected():
                member.disconnected_at = None
            case messages.Lost():
                why = "its connection timed out: its host died or the network to it is cut"
                member.leave(why, time.monotonic())
                self.facts.over.update(member.ranks)

    def _on_rank(self, rank: int, local_rank: int, member: Member, message: Message) -> None:
        now = time.monotonic()
        match message:
            case messages.Log():
                self._recorder.log(rank, message.lines)
            case messages.Metrics():
                self._recorder.metrics(rank, message.rows)
            case messages.Beat():
                self._hang.on_beat(rank, message.progress, now)
            case messages.Stack():
                self._hang.on_stack(rank, message.text)
            case messages.Position():
                self._remaining.note(rank, message)
            case messages.Ready():
                self._roster.note_ready(member.task, local_rank, message.torch)
            case messages.Rendezvous():
                hosts, one_host = self._roster.rendezvous_hosts(member), self._roster.is_on_one_host()
                self.broadcast(messages.Go(hosts, message.port, one_host))
                self._has_rendezvous = True
            case messages.PartKind():
                self.storage.note_kind(rank, sharded=message.sharded)
            case messages.Part():
                self.storage.add_part(rank, member.task, message)
            case messages.PartFailed():
                self.committer.drop(message.index)
            case messages.Damaged():
                self.committer.do(functools.partial(mark_damaged, self._folder_of(message.id)), as_owner=True)
            case messages.Entered():
                self._note_phase(rank, member, message)
            case messages.Returned() if member.left_at is None:
                self.facts.returned.add(rank)
                self._hang.on_return(rank, now)
                self._note_phase(rank, member, message)
            case messages.Finished() if rank in self.facts.returned:
                self.facts.over.add(rank)
                self.storage.finish(rank, member.task, message, self._recorder.status.metrics)
            case messages.Finished():
                # The rank exited cleanly because it was asked to: the training was stopped, not finished.
                stopped = messages.Failed(message.time, message="ended when it was asked to", exit_code=0)
                self._on_failure(rank, member, stopped.having(collateral=True))
            case messages.Failed():
                self._on_failure(rank, member, message)
            case messages.Exited():
                self.facts.over.add(rank)

    def _folder_of(self, name: str) -> str:
        return self.resume.folder if self.resume and self.resume.id == name else self._own.path(FOLDER, name)

    def _note_phase(self, rank: int, member: Member, message: messages.Entered | messages.Returned) -> None:
        """Records when a rank reached a phase, for the report of the run."""
        of_rank = {"type": message.kind, "rank": rank, "attempt": self._number, "host": member.name}
        self._recorder.event({**message.facts(), **of_rank})

    def _on_failure(self, rank: int, member: Member, message: messages.Failed) -> None:
        found = {**vars(message), "log_tail": [line[:LOG_TAIL_WIDTH] for line in message.log_tail]}
        # The agent has asked the rank to exit, which may have made it raise.
        found["collateral"] = message.collateral or member.left_at is not None
        report = message.having(**self._recorder.mask.facts(found))
        failure = Failure(rank, member.name, report, self._roster.host_of(rank), len(self.facts.failures))
        if self.facts.note_failure(failure, time.monotonic()):
            self._recorder.event({"type": "failure", "rank": rank, "host": failure.host, "what": failure.headline})
