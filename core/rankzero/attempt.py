"""`Attempt`: one try of a run, from the agents' first word to the last one's farewell."""

from __future__ import annotations

import logging
import queue
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from rankzero import policy, store, verdict
from rankzero.agent.network import is_loopback
from rankzero.channel.auth import new_secret
from rankzero.channel.frames import Message
from rankzero.channel.server import DISCONNECTED, LOST, RECONNECTED, ChannelServer
from rankzero.checkpoint import COMMIT_TIMEOUT, FOLDER, CheckpointConfig, Committer, Manifest
from rankzero.directory import RunDirectory
from rankzero.engines.base import AgentGroup, EngineSession, within
from rankzero.errors import EngineError, RankZeroError, RunCancelledError, RunTimeoutError, StartTimeoutError
from rankzero.hang import HangWatch
from rankzero.job import Job
from rankzero.policy import Failure
from rankzero.record import Recorder
from rankzero.result import ResultRef, fingerprint_of
from rankzero.watch import DRIVER, INTERRUPT, TICK, Inbox, Watch

logger = logging.getLogger(__name__)

BACKLOG = 256
"""Messages that may wait for the driver before agents have to keep their log lines."""

ENGINE_ENDED = "engine-ended"
CHECKPOINT_COMMITTED = "checkpoint-committed"
CHECKPOINT_LOST = "checkpoint-lost"
RESULT_STORED = "result-stored"


@dataclass
class _AgentState:
    """What the driver knows of one agent."""

    join: Message
    first_rank: int | None = None
    disconnected_at: float | None = None
    left_at: float | None = None
    why_left: str = ""
    cause: str = policy.LOST

    @property
    def name(self) -> str:
        return str(self.join["hostname"])

    def leave(self, why: str, cause: str = policy.LOST) -> None:
        """Notes that this agent has gone before it was told to; the first reason counts."""
        if self.left_at is None:
            self.left_at, self.why_left, self.cause = time.monotonic(), why, cause


class Attempt:
    """Drives one try: `run` returns when success is certain and the agents have ended, or raises the first cause."""

    def __init__(
        self,
        run: RunDirectory,
        job: Job,
        number: int,
        recorder: Recorder,
        session: EngineSession,
        inbox: Inbox,
        watch: Watch,
    ) -> None:
        self._run = run
        self._job = job
        self._number = number
        self._recorder = recorder
        self._session = session
        self._messages = inbox.renew()
        self._watch = watch
        self._agents: dict[int, _AgentState] = {}
        self._failures: list[Failure] = []
        self._first_failure_at = 0.0
        self._committed: set[int] = set()
        self._result: ResultRef | None = None
        self._uploads: dict[tuple[int, str], Message] = {}
        self._value: list[Any] = []
        self._returned: set[int] = set()
        self._ready: set[tuple[int, int]] = set()
        self._rendezvous = False
        self._hang = HangWatch(job.num_processes, lambda: self._server.broadcast({"type": "dump"}))
        self._stopping = False
        self._engine_error: BaseException | None = None
        self._engine_ended = False
        self._broken: RankZeroError | None = None
        self.started_at: float | None = None
        """Monotonic time at which every rank had started."""

    def run(self, start_deadline: float, env: dict[str, str], run_started_at: float | None) -> None:
        """Launches the agents and follows them to the end.

        Args:
            start_deadline: Monotonic time by which every rank must have started.
            env: The user's environment for the ranks.
            run_started_at: Monotonic time at which the first attempt had started; None in that one.
        """
        self._start_deadline = start_deadline
        self._run_started_at = run_started_at
        self._scratch = tempfile.TemporaryDirectory(prefix="rankzero-driver-") if self._run.is_remote else None
        config = CheckpointConfig(**self._job.checkpoints)
        self._committer = Committer(
            self._run,
            self._number,
            self._job.num_processes,
            config,
            self._job.fresh_since,
            lambda manifest: self._messages.put((DRIVER, {"type": CHECKPOINT_COMMITTED, "manifest": manifest})),
            lambda index: self._messages.put((DRIVER, {"type": CHECKPOINT_LOST, "index": index})),
        )
        self._remove_leftovers()
        self._resume = self._committer.newest()
        self._files = {**self._job.files, **self._resume_files()}
        secret = new_secret()
        self._server = ChannelServer(
            secret,
            self._session.bind_host,
            lambda task, message: self._messages.put((task, message)),
            served={name: file["location"] for name, file in self._files.items()},
            upload_directory=self._scratch.name if self._scratch else self._run.path("result"),
            ports=(self._job.ports[0], self._job.ports[1]) if self._job.ports else None,
            can_take=lambda: self._messages.qsize() < BACKLOG,
        )
        try:
            agent_config = {
                "driver": [self._session.driver_hosts, self._start_server()],
                "secret": secret,
                "use_gpu": self._job.use_gpu,
                "ports": self._job.ports,
                "grace": self._job.stop_grace,
                "warm_start": self._job.warm_start,
                "env": env,
            }
            group = self._session.launch(agent_config, self._on_engine_end)
            self._follow(group)
        finally:
            self._server.close()
            self._committer.close(0.0)
            if self._scratch:
                self._scratch.cleanup()

    def _remove_leftovers(self) -> None:
        """What ranks of an attempt before had begun to write when they died."""
        if not self._run.is_remote:
            for name in store.list_names(self._run.path("result")):
                if name.startswith("."):
                    store.remove(self._run.path("result", name))

    def _start_server(self) -> int:
        try:
            return self._server.start()
        except OSError as error:
            raise EngineError(f"the driver cannot listen for the agents: {error}") from error

    def _resume_files(self) -> dict[str, dict[str, Any]]:
        """The parts of the checkpoint to start from, as files that agents may fetch."""
        if self._resume is None:
            return {}
        return {
            f"checkpoint-{rank}": {**part, "location": self._run.path(FOLDER, self._resume.id, part["file"])}
            for rank, part in self._resume.parts.items()
        }

    def _on_engine_end(self, error: BaseException | None) -> None:
        self._messages.put((DRIVER, {"type": ENGINE_ENDED, "error": error}))

    @property
    def outcome(self) -> tuple[ResultRef, list[Any]] | None:
        """Rank 0's handle, and the value in a list if it is small JSON, as soon as success is certain.

        Whatever happens after that loses nothing.
        """
        if self._result is None or len(self._committed) < self._job.num_processes:
            return None
        return self._result, self._value

    def _follow(self, group: AgentGroup) -> None:
        try:
            while self.outcome is None:
                self._take(TICK)
                # What has come meanwhile, of many agents, is worth one look.
                for _ in range(BACKLOG):
                    if self._take(0.0) is None:
                        break
                self._look(group)
        except BaseException as error:
            self._stopping = True
            self._server.broadcast({"type": "stop", "grace": self._job.stop_grace})
            self._await_agents(group, self._job.stop_grace + policy.STOP_MARGIN)
            self._await_commits(policy.STOP_MARGIN if isinstance(error, RunCancelledError) else COMMIT_TIMEOUT)
            raise
        self._server.broadcast({"type": "end"})
        self._await_agents(group, policy.END_PATIENCE, patient=True)
        self._await_commits(COMMIT_TIMEOUT)

    def _await_agents(self, group: AgentGroup, timeout: float, *, patient: bool = False) -> None:
        """Takes the agents' last words until they have ended; then ends the engine's part.

        Args:
            group: The agents.
            timeout: Seconds to wait.
            patient: Count from the last message: lines that waited for a slow driver are still to come.
        """
        deadline = time.monotonic() + timeout
        while not self._engine_ended and time.monotonic() < deadline:
            kind = self._take(TICK)
            if kind == LOST:
                break
            if patient and kind not in (None, DISCONNECTED):
                deadline = time.monotonic() + timeout
            if patient and self._is_called_off():
                self._server.broadcast({"type": "stop", "grace": self._job.stop_grace})
                deadline, patient = time.monotonic() + self._job.stop_grace + policy.STOP_MARGIN, False
        if not self._engine_ended:
            logger.warning("agents did not end in time; cancelling them at the engine")
            within(policy.STOP_MARGIN, group.cancel)
            self._server.close()
            group.wait(policy.STOP_MARGIN)

    def _await_commits(self, timeout: float) -> None:
        """Waits for checkpoints on their way to the store, less long once the run is called off."""
        deadline = time.monotonic() + timeout
        self._committer.release()
        while self._committer.is_busy and time.monotonic() < deadline:
            self._take(TICK)
            if self._is_called_off():
                deadline = min(deadline, time.monotonic() + policy.STOP_MARGIN)
        self._committer.close(0.0 if self._committer.is_busy else TICK)
        self._take_all()

    def _is_called_off(self) -> bool:
        try:
            self._watch.check()
        except RunCancelledError:
            return True
        return False

    # -- messages ------------------------------------------------------------------------------

    def _take(self, timeout: float) -> str | None:
        """Handles what is there, or waits for it; the message's type, None if nothing came."""
        try:
            task, message = self._messages.get(timeout=timeout) if timeout else self._messages.get(False)
        except queue.Empty:
            return None
        self._handle(task, message)
        return str(message["type"])

    def _take_all(self) -> None:
        while self._take(0.0):
            pass

    def _handle(self, task: int, message: Message) -> None:
        kind = message["type"]
        if task == DRIVER:
            self._handle_own(kind, message)
        elif kind == "join":
            self._on_join(task, message)
        elif agent := self._agents.get(task):
            if "local_rank" in message:
                self._handle_rank(self._rank(agent, task, message), agent, task, message)
            else:
                self._handle_agent(agent, task, message)

    def _handle_own(self, kind: str, message: Message) -> None:
        if kind == ENGINE_ENDED:
            self._engine_ended = True
            self._engine_error = message["error"]
        elif kind == CHECKPOINT_COMMITTED:
            manifest: Manifest = message["manifest"]
            event = {"type": "checkpoint", "id": manifest.id, "metrics": manifest.metrics}
            self._recorder.event(event)
            self._recorder.update(checkpoint=manifest.id)
            self._server.broadcast({"type": "checkpoint", "manifest": manifest.to_json()})
        elif kind == CHECKPOINT_LOST:
            self._server.broadcast(message)
        elif kind == RESULT_STORED:
            self._on_result_stored(message)
        else:
            assert kind == INTERRUPT

    def _handle_agent(self, agent: _AgentState, task: int, message: Message) -> None:
        kind = message["type"]
        if kind == "rendezvous":
            self._on_rendezvous(agent, message)
        elif kind == "uploaded":
            self._uploads[task, message["name"]] = message
        elif kind == "leaving":
            agent.leave(message["why"], message["cause"])
        elif kind == DISCONNECTED:
            agent.disconnected_at = time.monotonic()
        elif kind == RECONNECTED:
            agent.disconnected_at = None
        elif kind == LOST:
            agent.leave("it was not heard of any more: its host died or the network to it is cut")

    def _handle_rank(self, rank: int, agent: _AgentState, task: int, message: Message) -> None:
        kind = message["type"]
        if kind == "log":
            self._recorder.log(rank, message["lines"])
        elif kind == "metric":
            self._recorder.metrics(rank, message["rows"])
        elif kind == "beat":
            self._hang.on_beat(rank, message["progress"], time.monotonic())
        elif kind == "ready":
            self._ready.add((task, message["local_rank"]))
            self._note_start()
        elif kind == "checkpoint":
            self._on_checkpoint_part(rank, task, message)
        elif kind == "checkpoint-failed":
            self._committer.drop(message["index"])
        elif kind == "returned":
            self._returned.add(rank)
        elif kind == "stack":
            self._hang.on_stack(rank, message["text"])
        elif kind == "commit":
            self._on_commit(rank, task, message)
        elif kind == "failure":
            self._on_failure(rank, agent, message)

    def _rank(self, agent: _AgentState, task: int, message: Message) -> int:
        first = agent.first_rank
        if first is None:
            first = task * self._job.processes_per_task
        return first + int(message["local_rank"])

    def _on_join(self, task: int, message: Message) -> None:
        if task in self._agents:
            # Restarts are ours to decide: ranks of two tries must never mix.
            self._agents[task].leave("another agent joined in its place")
            return
        agent = self._agents[task] = _AgentState(message)
        if self._stopping:
            self._server.send(task, {"type": "stop", "grace": 0.0})
            return
        python = ".".join(message["python"].split(".")[:2])
        if python != self._job.python:
            self._broken = EngineError(
                f"the function was pickled by Python {self._job.python}, but task {task} on {agent.name} "
                f"runs Python {message['python']}: point spark.pyspark.python to a Python {self._job.python}"
            )
        elif self._job.use_gpu and len(message["gpus"]) < message["workers"]:
            self._broken = EngineError(
                f"task {task} on {agent.name} was given the GPUs {message['gpus']} for "
                f"{message['workers']} ranks; each rank needs one of its own"
            )
        elif len(self._agents) == self._session.num_agents:
            self._assign_ranks()

    def _assign_ranks(self) -> None:
        order = policy.order_tasks([self._agents[task].join["host"] for task in range(len(self._agents))])
        # What is the same for all: of a thousand agents each would look at the thousand.
        same = {
            "type": "start",
            "master_addr": self._rendezvous_hosts(self._agents[order[0]])[0],
            "run_directory": None if self._run.is_remote else self._run.directory,
            "run_token": self._run.token(),
            "files": self._files,
            "checkpoint": self._resume.to_json() if self._resume else None,
            "beat_interval": policy.beat_interval(self._job.hang_timeout),
            "context": {
                "world_size": self._job.num_processes,
                "run_id": self._job.run_id,
                "attempt": self._number,
                "backend": self._job.resolved_backend(),
            },
        }
        first_rank = 0
        for node_rank, task in enumerate(order):
            agent = self._agents[task]
            agent.first_rank = first_rank
            first_rank += agent.join["workers"]
            self._server.send(task, {**same, "first_rank": agent.first_rank, "node_rank": node_rank})

    def _is_on_one_host(self) -> bool:
        return len({agent.name for agent in self._agents.values()}) == 1

    def _rendezvous_hosts(self, agent: _AgentState) -> list[str]:
        """Where the ranks of all hosts may reach an agent's, the best first."""
        hosts = list(dict.fromkeys([agent.join["host"], agent.join["address"]]))
        if not self._is_on_one_host():
            # A loopback address stands for another host on every other one.
            hosts = [host for host in hosts if not is_loopback(host)] or hosts
        return hosts

    def _on_rendezvous(self, agent: _AgentState, message: Message) -> None:
        hosts = self._rendezvous_hosts(agent)
        where = {"master_hosts": hosts, "master_port": message["port"], "one_host": self._is_on_one_host()}
        self._server.broadcast({"type": "go", **where})
        self._rendezvous = True
        self._note_start()

    def _note_start(self) -> None:
        """The attempt has started when every rank has imported torch and rank 0 has opened the rendezvous."""
        if self._rendezvous and len(self._ready) == self._job.num_processes and self.started_at is None:
            self.started_at = time.monotonic()
            self._recorder.update(state="running", started=self._recorder.status.started or time.time())

    def _on_checkpoint_part(self, rank: int, task: int, message: Message) -> None:
        part = {**message}
        if name := message.get("upload"):
            uploaded = self._uploads.pop((task, name), None)
            if uploaded is None or uploaded.get("sha256") != message["sha256"]:
                what = uploaded.get("error", "it was damaged on its way") if uploaded else "it did not arrive"
                logger.error("checkpoint %s: the part of rank %s is lost: %s", message["id"], rank, what)
                self._server.broadcast({"type": CHECKPOINT_LOST, "index": message["index"]})
                return
            part["uploaded"] = uploaded["path"]
        self._committer.add(rank, part)

    def _on_commit(self, rank: int, task: int, message: Message) -> None:
        if "result" not in message:
            self._committed.add(rank)
            return
        self._returned.add(rank)
        result = message["result"]
        path = result["path"]
        if uploaded := self._uploads.pop((task, "value"), None):
            if uploaded.get("sha256") != result["sha256"]:
                self._broken = verdict.not_stored(uploaded.get("error", "the upload was damaged on its way"))
                return
            path = uploaded["path"]
        uri = self._run.path("result", f"value-{self._number}.{result['format']}")

        def put() -> None:
            error = _upload(path, uri)
            fingerprint = None if error else fingerprint_of(uri, result["format"])
            stored = {"type": RESULT_STORED, "rank": rank, "result": result, "uri": uri, "error": error}
            self._messages.put((DRIVER, {**stored, "fingerprint": fingerprint}))

        if self._run.is_remote or "value" not in result:
            # In the thread that talks to the store: the driver goes on looking for failures and cancels.
            self._committer.do(put)
        else:
            put()

    def _on_result_stored(self, message: Message) -> None:
        if message["error"]:
            self._broken = verdict.not_stored(message["error"])
            return
        result = message["result"]
        summary = {**result["summary"], "metrics": dict(self._recorder.status.metrics)}
        self._result = ResultRef(
            message["uri"], result["format"], result["sha256"], result["size"], summary, message["fingerprint"]
        )
        self._value = [result["value"]] if "value" in result else []
        self._committed.add(message["rank"])

    def _on_failure(self, rank: int, agent: _AgentState, message: Message) -> None:
        if rank in self._committed:
            return
        facts = {key: message[key] for key in _FAILURE_FACTS if message.get(key) is not None}
        if agent.left_at is not None:
            # Its ranks were told to end, and may do that by an exception of their own.
            facts["collateral"] = True
        tail = tuple(line[: policy.LOG_TAIL_WIDTH] for line in message.get("log_tail", ()))
        failure = Failure(rank=rank, host=agent.name, order=len(self._failures), log_tail=tail, **facts)
        if not self._failures:
            self._first_failure_at = time.monotonic()
        self._failures.append(failure)
        self._recorder.event({"type": "failure", "rank": rank, "host": failure.host, "what": failure.headline})

    # -- deadlines -----------------------------------------------------------------------------

    def _look(self, group: AgentGroup) -> None:
        """Raises the typed error if the attempt cannot succeed any more."""
        now = time.monotonic()
        self._look_at_failures(group, now)
        self._watch.check()
        if self.started_at is None:
            if now > self._start_deadline:
                raise self._start_timeout()
            return
        timeout = self._job.timeout
        if timeout and now - (self._run_started_at or self.started_at) > timeout:
            raise RunTimeoutError(f"the run took longer than timeout={timeout} s and was ended")
        bound, storing = self._job.hang_timeout, bool(self._returned - self._committed)
        if bound is not None and (stacks := self._hang.look(now, bound, storing=storing)):
            raise verdict.hung(bound, stacks, self._run.directory)

    def _look_at_failures(self, group: AgentGroup, now: float) -> None:
        gone = [(task, agent) for task, agent in self._agents.items() if agent.left_at or agent.disconnected_at]
        waited = now - self._first_failure_at
        if self._failures and policy.is_settled(self._failures, waited):
            if gone and all(failure.collateral for failure in self._failures):
                # The peers of a lost host see broken connections only.
                raise self._lost(*gone[0], group)
            raise verdict.failed(self._failures, self._recorder.tail, self._run.directory)
        if self._broken:
            raise self._broken
        if self._engine_ended and not self._failures:
            left = [(task, agent) for task, agent in gone if agent.left_at is not None]
            # An agent that was told to go by somebody else ends as quietly as one that the driver told.
            raise self._lost(*left[0], group) if left else self._engine_failed(group)
        for task, agent in gone:
            if agent.left_at is not None and now - agent.left_at > policy.AGENT_LOST_WINDOW:
                raise self._lost(task, agent, group)

    def _engine_failed(self, group: AgentGroup) -> RankZeroError:
        error = self._engine_error or RuntimeError("the agents ended before every rank had returned")
        return group.explain(error)

    def _lost(self, task: int, agent: _AgentState, group: AgentGroup) -> EngineError:
        first = agent.first_rank or 0
        ranks = range(first, first + agent.join["workers"])
        why = agent.why_left or "its connection broke and did not come back"
        explained = group.explain(self._engine_error) if self._engine_ended and self._engine_error else None
        return verdict.lost(f"task {task} on {agent.name}", ranks, why, agent.cause, explained, self._failures)

    def _start_timeout(self) -> StartTimeoutError:
        tasks = self._session.num_agents
        ranks = [
            self._rank(agent, task, {"local_rank": local_rank})
            for task, agent in self._agents.items()
            for local_rank in range(agent.join["workers"])
            if (task, local_rank) not in self._ready
        ]
        missing_tasks = [task for task in range(tasks) if task not in self._agents]
        return verdict.start_timeout(self._job.start_timeout, tasks, missing_tasks, ranks)


_FAILURE_FACTS = (
    "exception_type",
    "message",
    "traceback",
    "exit_code",
    "signal",
    "collateral",
    "cause",
    "retryable",
)


RESULT_PATIENCE = 30.0
"""Seconds for which a store that refuses the result is asked again."""

_RESULT_INTERVAL = 0.5


def _upload(path: str, uri: str) -> str | None:
    """Moves the result into place; what went wrong, in words, if the store refused it to the end."""
    try:
        store.patiently(
            lambda: store.upload(path, uri), RESULT_PATIENCE, _RESULT_INTERVAL, lambda _: not store.is_url(uri)
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
