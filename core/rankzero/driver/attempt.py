"""`Attempt`: one attempt of a run, from the first agent that joins until the last one has disconnected."""

from __future__ import annotations

import base64
import logging
import queue
import time
from typing import Any

from rankzero import store
from rankzero.bounds import STORE_OUTAGE
from rankzero.channel import messages
from rankzero.channel.driver_end.server import ChannelServer
from rankzero.channel.messages import Message, decode, encode
from rankzero.driver import ending, policy
from rankzero.driver.agents import agent_config
from rankzero.driver.commits import COMMIT_TIMEOUT, Committer, NotOwnerError
from rankzero.driver.ending import Facts, Failure, Success
from rankzero.driver.handover import RETRY_INTERVAL
from rankzero.driver.hang import HangWatch
from rankzero.driver.policy import Placement
from rankzero.driver.recorder import Recorder
from rankzero.driver.remaining import RemainingWatch
from rankzero.driver.roster import Member, Roster
from rankzero.driver.rows import carry_rows, remove_rows
from rankzero.driver.scratch import Scratch
from rankzero.driver.storage import RESULT_STORED, Storage, remove_values
from rankzero.driver.watch import DRIVER, INTERRUPT, TICK, Inbox, Watch
from rankzero.engines.base import AgentGroup, EngineSession, within
from rankzero.errors import EngineError, RunCancelledError, RunTimeoutError, StartTimeoutError
from rankzero.host.processes import caller_process
from rankzero.job import Job
from rankzero.run.checkpoints import FOLDER, MANIFEST, PIECES, CheckpointConfig, Manifest
from rankzero.run.current import owns
from rankzero.run.directory import RunDirectory

logger = logging.getLogger(__name__)

BACKLOG = 256
"""Most messages that wait for the driver before agents have to hold back their log lines."""

ENGINE_ENDED = "engine-ended"
CHECKPOINT_COMMITTED = "checkpoint-committed"
CHECKPOINT_LOST = "checkpoint-lost"
SUCCESS_RECORDED = "success-recorded"


class Attempt:
    """Drives one attempt: `run` returns when success is certain and the agents have ended, or raises the cause."""

    def __init__(
        self,
        run: RunDirectory,
        job: Job,
        number: int,
        recorder: Recorder,
        session: EngineSession,
        placement: Placement,
        inbox: Inbox,
        watch: Watch,
    ) -> None:
        self._run = run
        self._job = job = job.sized(placement.num_tasks)
        self._number = number
        self._recorder = recorder
        self._session = session
        self._num_tasks = placement.num_tasks + placement.spare
        self._messages = inbox.renew()
        self._watch = watch
        num_agents = session.num_agents(placement.num_tasks)
        self._roster = Roster(num_agents, job.processes_per_task, placement.spare, placement.left_out)
        self._facts = Facts(job.num_processes, run.directory)
        self._rendezvous = self._recorded = False
        self._hang = HangWatch(job.num_processes, lambda: self._broadcast(messages.Dump()))
        self._remaining = RemainingWatch(job.num_processes, lambda: self._broadcast(messages.Peek()))
        self._stopping = False
        self.started_at: float | None = None
        """Monotonic time at which every rank had started."""
        self.failed_host: str | None = None
        """The host that may be to blame for the end of this attempt, as the engine names it."""

    def run(self, start_deadline: float, env: dict[str, str], run_started_at: float | None) -> None:
        """Launches the agents and follows them until they have ended.

        Args:
            start_deadline: Monotonic time by which every rank must have started.
            env: The user's environment for the ranks.
            run_started_at: Monotonic time at which the first attempt had started; None in the first attempt.
        """
        self._start_deadline = start_deadline
        self._report_at = time.monotonic() + policy.WAITING_INTERVAL
        self._run_started_at = run_started_at
        encrypts = self._job.encrypts(by_default=self._session.encrypts)
        identity = self._session.identity() if encrypts else None
        if identity:
            logger.info("the connections of attempt %s are encrypted", self._number)
        self._scratch = None
        if self._run.is_remote:
            self._scratch = Scratch()
        self._committer = Committer(
            self._run,
            self._number,
            self._job.num_processes,
            CheckpointConfig(**self._job.checkpoints),
            self._job.fresh_since,
            lambda manifest: self._send({"type": CHECKPOINT_COMMITTED, "manifest": manifest}),
            lambda index: self._send({"type": CHECKPOINT_LOST, "index": index}),
            lambda: owns(self._run, self._job.submission, self._job.nonce),
        )
        self._storage = Storage(self._run, self._number, self._committer, self._facts, self._send)
        began = time.monotonic()
        try:
            store.patiently(self._read_store, STORE_OUTAGE, RETRY_INTERVAL, self._gives_up)
        except BaseException:
            self._committer.close(0.0)
            if self._scratch:
                self._scratch.remove()
            raise
        # An outage of the store takes no time from the ranks' start.
        self._start_deadline = start_deadline = start_deadline + time.monotonic() - began
        secret = self._session.secret(self._number)
        self._server = ChannelServer(
            secret,
            lambda task, message: self._messages.put((task, message)),
            served={name: file["location"] for name, file in self._job.files.items()} | self._resume_files(),
            upload_directory=self._scratch.path if self._scratch else self._run.path("result"),
            can_take=lambda: self._messages.qsize() < BACKLOG,
            identity=identity,
        )
        try:
            config = {
                **agent_config(self._job, self._number, env, start_deadline - time.monotonic()),
                "driver": [self._session.driver_hosts, self._start_server()],
                "secret": secret,
                "caller": caller_process(),
                "certificate": base64.b64encode(identity.certificate).decode() if identity else None,
            }
            self._recorder.note_places(self._job.num_processes, held=True)
            self._group = self._session.launch(self._num_tasks, config, self._on_engine_end)
            self._follow(self._group)
        finally:
            self._recorder.note_places(self._job.num_processes, held=False)
            self._server.close()
            self._committer.close(0.0)
            if self._scratch:
                self._scratch.remove()

    def _read_store(self) -> None:
        """Reads the checkpoint to start from and removes what earlier attempts left. May be repeated after an error."""
        self._resume = self._committer.newest()
        carry_rows(self._run, self._number, self._committer.tables)
        self._remove_leftovers()
        self._token = self._run.token()

    def _gives_up(self, error: Exception) -> bool:
        """Returns True for an error that no repetition corrects; raises RunCancelledError if the run must end."""
        self._watch.check()
        return isinstance(error, NotOwnerError)

    def _remove_leftovers(self) -> None:
        """Removes files that ranks of earlier attempts had begun to write when the ranks or their driver died."""
        remove_rows(self._run, range(self._job.first_attempt, self._number), {})
        if self._run.is_remote:
            remove_values(self._run, range(self._job.first_attempt, self._number))
        else:
            for name in store.list_names(self._run.path("result")):
                if name.startswith("."):
                    store.remove(self._run.path("result", name))

    def _start_server(self) -> int:
        try:
            return self._server.start(self._session.listen(self._job.ports))
        except OSError as error:
            raise EngineError(f"the driver cannot listen for the agents: {error}") from error

    def _resume_files(self) -> dict[str, str]:
        """Returns the files of the checkpoint to start from, by the names under which agents request them."""
        if self._resume is None:
            return {}
        files = {rank: part["file"] for rank, part in self._resume.parts.items()}
        files |= {"manifest": MANIFEST, "pieces": PIECES}
        return {f"checkpoint-{name}": self._run.path(FOLDER, self._resume.id, file) for name, file in files.items()}

    def _on_engine_end(self, error: BaseException | None) -> None:
        self._send({"type": ENGINE_ENDED, "error": error})

    def _send(self, message: dict[str, Any]) -> None:
        """Puts a message from one of the driver's own threads into the driver's queue. Any thread may call it."""
        self._messages.put((DRIVER, message))

    @property
    def outcome(self) -> Success | None:
        """Rank 0's handle, and the value in a list if it is small JSON, as soon as success is certain; else None.

        No later event takes a success back.
        """
        return self._facts.success

    def _follow(self, group: AgentGroup) -> None:
        try:
            while self.outcome is None:
                self._take(TICK)
                # Many agents may have sent messages meanwhile: one check after all of them is enough.
                for _ in range(BACKLOG):
                    if self._take(0.0) is None:
                        break
                if self.outcome is None:
                    self._check(group)
        except BaseException as error:
            self._stopping = True
            self._broadcast(messages.Stop(self._job.stop_grace))
            self._await_agents(group, self._job.stop_grace + policy.STOP_MARGIN)
            # Messages that arrived meanwhile may complete a checkpoint, which is committed first.
            self._take_all()
            self._await_commits(policy.STOP_MARGIN if isinstance(error, RunCancelledError) else COMMIT_TIMEOUT)
            raise
        self._record_success()
        self._broadcast(messages.End())
        self._await_agents(group, self._job.exit_timeout + policy.END_TIMEOUT, patient=True)
        self._await_commits(COMMIT_TIMEOUT)

    def _record_success(self) -> None:
        """Makes success durable first: disconnects and exit handlers take time, and the driver may die meanwhile."""
        assert self.outcome is not None
        deadline = time.monotonic() + STORE_OUTAGE
        self._recorder.commit(*self.outcome, then=lambda: self._send({"type": SUCCESS_RECORDED}))
        while not self._recorded and time.monotonic() < deadline and not self._is_called_off():
            self._take(TICK)

    def _await_agents(self, group: AgentGroup, timeout: float, *, patient: bool = False) -> None:
        """Receives the agents' final messages until the agents have ended; cancels those that have not at the engine.

        Args:
            group: The agents.
            timeout: Seconds to wait.
            patient: Restart the time-out at each message about ranks, since agents may still send lines that waited for
                a slow driver. Samples of hosts do not count: an agent sends them also while the kernel cannot end a
                rank.
        """
        deadline, released = time.monotonic() + timeout, patient
        while not self._facts.engine_ended and time.monotonic() < deadline:
            kind = self._take(TICK)
            if not released and len(self._facts.over) >= self._job.num_processes:
                # Ranks that have committed wait for their peers. No rank is left that needs the rest of the grace.
                released = True
                self._broadcast(messages.End())
            if kind == messages.Lost.kind:
                break
            if patient and kind not in (None, messages.Disconnected.kind, messages.Usage.kind):
                deadline = time.monotonic() + timeout
            if patient and self._is_called_off():
                self._broadcast(messages.Stop(self._job.stop_grace))
                deadline, patient = time.monotonic() + self._job.stop_grace + policy.STOP_MARGIN, False
        if not self._facts.engine_ended:
            logger.warning("agents did not end in time; cancelling them at the engine")
            within(policy.STOP_MARGIN, group.cancel)
            self._server.close()
            group.wait(policy.STOP_MARGIN)

    def _await_commits(self, timeout: float) -> None:
        """Waits for uploads to the store, for less time once the run is cancelled, then deletes unfinished ones."""
        deadline = time.monotonic() + timeout
        self._committer.release()
        deadline = self._await_committer(deadline)
        if self._stopping and self.outcome is None:
            # Only now: until here, a value that was still being stored could have made the attempt a success.
            self._storage.sweep()
        else:
            self._storage.abort_uploads()
        self._await_committer(deadline)
        self._committer.close(0.0 if self._committer.is_busy else TICK)
        self._take_all()

    def _await_committer(self, deadline: float) -> float:
        """Waits until the committer has done its work; returns the deadline, which a cancel moves forward."""
        while self._committer.is_busy and time.monotonic() < deadline:
            self._take(TICK)
            if self._is_called_off():
                deadline = min(deadline, time.monotonic() + policy.STOP_MARGIN)
        self._take_all()
        return deadline

    def _is_called_off(self) -> bool:
        try:
            self._watch.check()
        except RunCancelledError:
            return True
        return False

    # -- messages ------------------------------------------------------------------------------

    def _take(self, timeout: float) -> str | None:
        """Handles the next message, waiting for it if need be; returns its type, or None if there was none in time."""
        try:
            task, message = self._messages.get(timeout=timeout) if timeout else self._messages.get(False)
        except queue.Empty:
            return None
        self._handle(task, message)
        return str(message["type"])

    def _take_all(self) -> None:
        while self._take(0.0):
            pass

    def _broadcast(self, message: Message) -> None:
        self._server.broadcast(encode(message))

    def _handle(self, task: int, wire: dict[str, Any]) -> None:
        if task == DRIVER:
            self._handle_own(wire["type"], wire)
            return
        message = decode(wire)
        if isinstance(message, messages.Join):
            self._on_join(task, message)
        elif isinstance(message, messages.Left):
            self._group.note_disconnect(task)
        elif member := self._roster.get(task):
            if "local_rank" in wire:
                self._handle_rank(self._roster.rank(member, wire["local_rank"]), wire["local_rank"], member, message)
            else:
                self._handle_agent(member, message)

    def _handle_own(self, kind: str, message: dict[str, Any]) -> None:
        if kind == ENGINE_ENDED:
            self._facts.engine_ended = True
            self._facts.engine_error = message["error"]
        elif kind == CHECKPOINT_COMMITTED:
            manifest: Manifest = message["manifest"]
            event = {"type": "checkpoint", "id": manifest.id, "metrics": manifest.metrics}
            self._recorder.event(event)
            self._recorder.update(checkpoint=manifest.id)
            for member in self._roster.numbered():
                self._server.send(member.task, encode(messages.Committed(manifest.for_ranks(member.ranks))))
        elif kind == CHECKPOINT_LOST:
            self._broadcast(messages.NotCommitted(message["index"]))
        elif kind == SUCCESS_RECORDED:
            self._recorded = True
        elif kind == RESULT_STORED:
            self._storage.on_stored(message, self._recorder.status.metrics)
        else:
            assert kind == INTERRUPT

    def _handle_agent(self, member: Member, message: Message) -> None:
        if isinstance(message, messages.Uploaded):
            self._storage.note_upload(member.task, message)
        elif isinstance(message, messages.Usage):
            self._recorder.event({"type": message.kind, **message.sample, "host": member.name})
        elif isinstance(message, messages.Leaving):
            member.leave(message.why, time.monotonic(), message.cause)
        elif isinstance(message, messages.Disconnected):
            member.disconnected_at = time.monotonic()
        elif isinstance(message, messages.Reconnected):
            member.disconnected_at = None
        elif isinstance(message, messages.Lost):
            why = "its connection timed out: its host died or the network to it is cut"
            member.leave(why, time.monotonic())
            for rank in member.ranks:
                self._facts.over.add(rank)

    def _handle_rank(self, rank: int, local_rank: int, member: Member, message: Message) -> None:
        if isinstance(message, (messages.Finished, messages.Failed, messages.Exited)):
            self._facts.over.add(rank)
        if isinstance(message, messages.Log):
            self._recorder.log(rank, message.lines)
        elif isinstance(message, messages.Metrics):
            self._recorder.metrics(rank, message.rows)
        elif isinstance(message, messages.Beat):
            self._hang.on_beat(rank, message.progress, time.monotonic())
        elif isinstance(message, messages.Ready):
            self._roster.note_ready(member.task, local_rank, message.torch)
            self._note_start()
        elif isinstance(message, messages.Rendezvous):
            self._on_rendezvous(member, message)
        elif isinstance(message, messages.PartKind):
            self._storage.note_kind(rank, sharded=message.sharded)
        elif isinstance(message, messages.Part):
            self._storage.add_part(rank, member.task, message)
        elif isinstance(message, messages.PartFailed):
            self._committer.drop(message.index)
        elif isinstance(message, messages.Returned):
            if not self._stopping and member.left_at is None:
                self._facts.returned.add(rank)
                self._hang.on_return(rank, time.monotonic())
                self._note_phase(rank, member, message)
        elif isinstance(message, messages.Entered):
            self._note_phase(rank, member, message)
        elif isinstance(message, messages.Stack):
            self._hang.on_stack(rank, message.text)
        elif isinstance(message, messages.Position):
            self._remaining.note(rank, message.stack, message.cpu)
        elif isinstance(message, messages.Finished) and rank not in self._facts.returned:
            # The rank exited cleanly because it was asked to: the training was stopped, not finished.
            stopped = messages.Failed(message.time, exit_code=0, message="ended when it was asked to")
            self._on_failure(rank, member, stopped)
        elif isinstance(message, messages.Finished):
            self._storage.commit(rank, member.task, message)
        elif isinstance(message, messages.Failed):
            self._on_failure(rank, member, message)

    def _note_phase(self, rank: int, member: Member, message: messages.Entered | messages.Returned) -> None:
        """Records when a rank reached a phase, for the report of the run."""
        of_rank = {"type": message.kind, "rank": rank, "attempt": self._number, "host": member.name}
        self._recorder.event({**message.facts(), **of_rank})

    def _on_join(self, task: int, message: messages.Join) -> None:
        if self._roster.is_surplus(task):
            self._dismiss(task)
            return
        member = self._roster.join(task, message, time.monotonic())
        if member is None:
            return
        if self._stopping:
            self._dismiss(task)
        elif why := member.why_unfit(self._job.python, self._job.use_gpu):
            self._facts.refusal = EngineError(why)
        elif chosen := self._roster.choose():
            self._assign_ranks(chosen)

    def _dismiss(self, task: int) -> None:
        self._server.send(task, encode(messages.Stop(grace=0.0)))

    def _assign_ranks(self, members: list[Member]) -> None:
        for task in filter(self._roster.is_surplus, range(self._roster.num_expected)):
            self._dismiss(task)
        # Encoded once: encoding it for each agent would be quadratic in their number.
        same: dict[str, Any] = {
            "master_addr": self._roster.rendezvous_hosts(members[0])[0],
            "run_directory": self._run.directory,
            "run_token": self._token,
            "files": self._job.files,
            "beat_interval": policy.beat_interval(self._job.hang_timeout),
            "context": {
                "world_size": self._job.num_processes,
                "run_id": self._job.run_id,
                "attempt": self._number,
                "backend": self._job.resolved_backend(),
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
                checkpoint=self._resume.for_ranks(member.ranks) if self._resume else None,
            )
            sampled.add(member.host)
            self._server.send(member.task, encode(assign))

    def _on_rendezvous(self, member: Member, message: messages.Rendezvous) -> None:
        hosts, one_host = self._roster.rendezvous_hosts(member), self._roster.is_on_one_host()
        self._broadcast(messages.Go(hosts, message.port, one_host))
        self._rendezvous = True
        self._note_start()

    def _note_start(self) -> None:
        """Records the start once every rank has imported torch and rank 0 has opened the rendezvous."""
        is_complete = self._rendezvous and self._roster.num_ready == self._job.num_processes
        if is_complete and self.started_at is None:
            self.started_at = time.monotonic()
            self._recorder.update(state="running", started=self._recorder.status.started or time.time())
            if what := self._roster.unlike_torch(self._job.torch):
                self._recorder.event({"type": "versions", "what": what})
                self._recorder.log(0, [f"rankzero: {what}"])

    def _on_failure(self, rank: int, member: Member, message: messages.Failed) -> None:
        report = self._recorder.mask.facts(message.facts())
        placed_on, order = self._roster.host_of(rank), len(self._facts.failures)
        failure = Failure.reported(rank, member, report, placed_on, order)
        if self._facts.note_failure(failure, time.monotonic()):
            self._recorder.event({"type": "failure", "rank": rank, "host": failure.host, "what": failure.headline})

    # -- deadlines -----------------------------------------------------------------------------

    def _check(self, group: AgentGroup) -> None:
        """Raises the typed error if the attempt can no longer succeed."""
        now = time.monotonic()
        self._check_outcome(group, now)
        self._watch.check()
        timeout, began = self._job.timeout, self._run_started_at or self.started_at
        if timeout and began is not None and now - began > timeout:
            raise RunTimeoutError(f"the run took longer than timeout={timeout} s and was ended")
        if self.started_at is None:
            if now > self._start_deadline:
                raise self._start_timeout()
            if now > self._report_at:
                self._report_at = now + policy.WAITING_INTERVAL
                self._report_waiting()
            return
        group.tolerate_outage()
        self._check_hangs(now)

    def _check_hangs(self, now: float) -> None:
        if what := self._remaining.poll(now, self._hang.returned, self._hang.progress_at):
            self._recorder.event({"type": "waiting", "what": what})
            self._recorder.log(0, [f"rankzero: {what}"])
        if self._remaining.is_hung(now):
            if stacks := self._hang.poll(now, 0.0):
                raise ending.left_waiting(self._hang.returned, stacks, self._run.directory)
        elif (bound := self._job.hang_timeout) is not None and (stacks := self._hang.poll(now, bound)):
            raise ending.hung(bound, stacks, self._run.directory)

    def _check_outcome(self, group: AgentGroup, now: float) -> None:
        verdict = ending.judge(self._facts, self._roster.gone(), now, group.explain, self._recorder.tail)
        if verdict and verdict.error:
            self.failed_host = verdict.blamed
            raise verdict.error

    def _report_waiting(self) -> None:
        """Records which tasks or ranks have not started yet, where followers of the run see it."""
        tasks, ranks = self._roster.missing_tasks(), self._roster.ranks_not_ready()
        what = policy.starting_message(self._roster.num_expected, tasks, ranks)
        self._recorder.event({"type": "waiting", "what": what})
        self._recorder.log(0, [f"rankzero: {what}"])

    def _start_timeout(self) -> StartTimeoutError:
        missing, ranks = self._roster.missing_tasks(), self._roster.ranks_not_ready()
        return ending.start_timeout(self._job.start_timeout, self._roster.num_expected, missing, ranks)
