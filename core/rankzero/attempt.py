"""`Attempt`: one try of a run, from the agents' first word to the last one's farewell."""

from __future__ import annotations

import logging
import queue
import time
from dataclasses import dataclass, field
from typing import Any

from rankzero import policy, store
from rankzero.channel.auth import new_secret
from rankzero.channel.frames import Message
from rankzero.channel.server import LOST, ChannelServer
from rankzero.engines.base import AgentGroup, EngineSession
from rankzero.errors import (
    EngineError,
    RankZeroError,
    ResultError,
    RunCancelledError,
    RunTimeoutError,
    StartTimeoutError,
    WorkerFailedError,
)
from rankzero.job import Job
from rankzero.policy import Failure
from rankzero.record import Recorder
from rankzero.result import ResultRef
from rankzero.run import RunDirectory

logger = logging.getLogger(__name__)

TICK = 0.1
"""Seconds between two looks at deadlines and at the request to cancel."""

REMOTE_TICK = 2.0
"""The same for a run directory on an object store, where a look is a request."""

ENGINE_ENDED = "engine-ended"
INTERRUPT = "interrupt"
DRIVER = -1
"""The "task" under which the driver's own threads put messages into the queue."""


@dataclass
class _AgentState:
    """What the driver knows of one agent."""

    join: Message
    first_rank: int | None = None
    lost_at: float | None = None
    said_bye: bool = False

    @property
    def name(self) -> str:
        return str(self.join["hostname"])


@dataclass
class Inbox:
    """What other threads tell the driver: agents' messages, the engine's end, interrupts."""

    queue: queue.SimpleQueue[tuple[int, Message]] = field(default_factory=queue.SimpleQueue)

    def put(self, task: int, message: Message) -> None:
        """From any thread, and from signal handlers."""
        self.queue.put((task, message))

    def interrupt(self, reason: str) -> None:
        """Asks the driver to cancel the run."""
        self.put(DRIVER, {"type": INTERRUPT, "reason": reason})


class Attempt:
    """Drives one try: `run` returns rank 0's handle or raises the typed first cause."""

    def __init__(self, run: RunDirectory, job: Job, recorder: Recorder, session: EngineSession, inbox: Inbox) -> None:
        self._run = run
        self._job = job
        self._recorder = recorder
        self._session = session
        self._inbox = inbox
        self._agents: dict[int, _AgentState] = {}
        self._failures: list[Failure] = []
        self._first_failure_at = 0.0
        self._committed: set[int] = set()
        self._result: ResultRef | None = None
        self._upload: Message | None = None
        self._value: list[Any] = []
        self._ready: set[tuple[int, int]] = set()
        self._rendezvous = False
        self._started_at: float | None = None
        self._stopping = False
        self._engine_error: BaseException | None = None
        self._engine_ended = False
        self._broken: RankZeroError | None = None
        self._next_look = 0.0

    def run(self, start_deadline: float, private: dict[str, Any]) -> tuple[ResultRef, list[Any]]:
        """Launches the agents and follows them to the end.

        Args:
            start_deadline: Monotonic time by which every rank must have started.
            private: The user's environment under ``"env"``.

        Returns:
            The handle of rank 0's value, and the value itself in a list if it is small JSON.
        """
        secret = new_secret()
        self._start_deadline = start_deadline
        self._server = ChannelServer(
            secret,
            self._session.bind_host,
            self._inbox.put,
            served={name: file["location"] for name, file in self._job.files.items()},
            upload_directory=self._upload_directory(),
        )
        try:
            port = self._server.start()
            config = {
                "driver": [self._session.driver_host, port],
                "secret": secret,
                "use_gpu": self._job.use_gpu,
                "env": private["env"],
            }
            group = self._session.launch(config, self._on_engine_end)
            self._follow(group)
        finally:
            self._server.close()
        assert self.outcome is not None
        return self.outcome

    def _upload_directory(self) -> str:
        if not self._run.is_remote:
            return self._run.path("result")
        import tempfile

        self._scratch = tempfile.TemporaryDirectory(prefix="rankzero-driver-")
        return self._scratch.name

    def _on_engine_end(self, error: BaseException | None) -> None:
        self._inbox.put(DRIVER, {"type": ENGINE_ENDED, "error": error})

    @property
    def outcome(self) -> tuple[ResultRef, list[Any]] | None:
        """What `run` returns, as soon as it is certain; an interrupt after that loses nothing."""
        if self._result is None or len(self._committed) < self._job.num_processes:
            return None
        return self._result, self._value

    def _follow(self, group: AgentGroup) -> None:
        try:
            while self.outcome is None:
                self._take(TICK)
                self._look(group)
        except BaseException:
            self._stopping = True
            self._server.broadcast({"type": "stop", "grace": policy.STOP_GRACE})
            self._await_agents(group, policy.STOP_GRACE + policy.STOP_MARGIN)
            raise
        self._server.broadcast({"type": "end"})
        self._await_agents(group, policy.STOP_GRACE + policy.STOP_MARGIN)

    def _await_agents(self, group: AgentGroup, timeout: float) -> None:
        """Takes the agents' last words until they have ended; then ends the engine's part."""
        deadline = time.monotonic() + timeout
        while not self._engine_ended and time.monotonic() < deadline:
            self._take(TICK)
        if not self._engine_ended:
            logger.warning("agents did not end within %s s; cancelling them at the engine", timeout)
            group.cancel()
            self._server.close()
            group.wait(policy.STOP_MARGIN)
        while self._take(0.0):
            pass

    # -- messages ------------------------------------------------------------------------------

    def _take(self, timeout: float) -> bool:
        """Handles what is there, or waits for it; False if nothing came."""
        try:
            task, message = self._inbox.queue.get(timeout=timeout) if timeout else self._inbox.queue.get(False)
        except queue.Empty:
            return False
        self._handle(task, message)
        return True

    def _handle(self, task: int, message: Message) -> None:
        kind = message["type"]
        if kind == ENGINE_ENDED:
            self._engine_ended = True
            self._engine_error = message["error"]
        elif kind == INTERRUPT:
            self._broken = self._broken or RunCancelledError(message["reason"])
        elif kind == "join":
            self._on_join(task, message)
        elif agent := self._agents.get(task):
            self._handle_agent(task, agent, message)

    def _handle_agent(self, task: int, agent: _AgentState, message: Message) -> None:
        kind = message["type"]
        if kind == "log":
            self._recorder.log(self._rank(task, message), message["lines"])
        elif kind == "metric":
            self._recorder.metric(self._rank(task, message), message["metrics"], message["time"])
        elif kind == "ready":
            self._ready.add((task, message["local_rank"]))
            self._note_start()
        elif kind == "rendezvous":
            self._on_rendezvous(agent, message)
        elif kind == "uploaded":
            self._upload = message
        elif kind == "commit":
            self._on_commit(self._rank(task, message), message)
        elif kind == "failure":
            self._on_failure(self._rank(task, message), agent, message)
        elif kind == "bye":
            agent.said_bye = True
        elif kind == LOST and not agent.said_bye:
            agent.lost_at = time.monotonic()

    def _rank(self, task: int, message: Message) -> int:
        first = self._agents[task].first_rank
        if first is None:
            first = task * self._job.processes_per_task
        return first + int(message["local_rank"])

    def _on_join(self, task: int, message: Message) -> None:
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
        first_rank = 0
        for node_rank, task in enumerate(order):
            agent = self._agents[task]
            agent.first_rank = first_rank
            first_rank += agent.join["workers"]
            self._server.send(
                task,
                {
                    "type": "start",
                    "first_rank": agent.first_rank,
                    "node_rank": node_rank,
                    "master_addr": self._agents[order[0]].join["host"],
                    "run_directory": None if self._run.is_remote else self._run.directory,
                    "run_token": self._run.token(),
                    "files": self._job.files,
                    "context": {
                        "world_size": self._job.num_processes,
                        "run_id": self._job.run_id,
                        "attempt": self._recorder.status.attempt,
                        "backend": self._job.resolved_backend(),
                    },
                },
            )

    def _on_rendezvous(self, agent: _AgentState, message: Message) -> None:
        go = {"type": "go", "master_addr": agent.join["host"], "master_port": message["port"]}
        self._server.broadcast(go)
        self._rendezvous = True
        self._note_start()

    def _note_start(self) -> None:
        """The run has started when every rank has imported torch and rank 0 has opened the rendezvous."""
        if self._rendezvous and len(self._ready) == self._job.num_processes and self._started_at is None:
            self._started_at = time.monotonic()
            self._recorder.update(state="running", started=time.time())

    def _on_commit(self, rank: int, message: Message) -> None:
        if "result" in message:
            try:
                self._store_result(message["result"])
            except (OSError, ResultError) as error:
                self._broken = ResultError(f"rank 0 returned, but its value could not be stored: {error}")
                return
        self._committed.add(rank)

    def _store_result(self, result: dict[str, Any]) -> None:
        uri = self._run.path("result", f"value.{result['format']}")
        path = result["path"]
        if self._upload is not None:
            if self._upload.get("sha256") != result["sha256"]:
                raise ResultError(str(self._upload.get("error", "the upload was damaged on its way")))
            path = self._upload["path"]
        store.upload(path, uri)
        summary = {**result["summary"], "metrics": dict(self._recorder.status.metrics)}
        self._result = ResultRef(uri, result["format"], result["sha256"], result["size"], summary)
        self._value = [result["value"]] if "value" in result else []

    def _on_failure(self, rank: int, agent: _AgentState, message: Message) -> None:
        if rank in self._committed:
            return
        facts = {key: message[key] for key in _FAILURE_FACTS if message.get(key) is not None}
        failure = Failure(rank=rank, host=agent.name, order=len(self._failures), **facts)
        if not self._failures:
            self._first_failure_at = time.monotonic()
        self._failures.append(failure)
        self._recorder.event({"type": "failure", "rank": rank, "host": failure.host, "what": failure.headline})

    # -- deadlines -----------------------------------------------------------------------------

    def _look(self, group: AgentGroup) -> None:
        """Raises the typed error if the attempt cannot succeed any more."""
        now = time.monotonic()
        if self._failures and policy.is_settled(self._failures, now - self._first_failure_at):
            raise self._failed()
        if self._broken:
            raise self._broken
        if self._engine_ended and not self._failures:
            error = self._engine_error or RuntimeError("the agents ended before every rank had returned")
            raise group.explain(error)
        for task, agent in self._agents.items():
            if agent.lost_at is not None and now - agent.lost_at > policy.AGENT_LOST_WINDOW:
                raise EngineError(f"the connection to task {task} on {agent.name} was lost; its host or executor died")
        if now < self._next_look:
            return
        self._next_look = now + look_interval(self._run)
        check_cancel(self._run)
        if self._started_at is None and now > self._start_deadline:
            raise self._start_timeout()
        if self._started_at and self._job.timeout and now - self._started_at > self._job.timeout:
            raise RunTimeoutError(f"the run took longer than timeout={self._job.timeout} s and was ended")

    def _failed(self) -> RankZeroError:
        cause = policy.first_cause(self._failures)
        if cause.cause == "no-torch":
            return EngineError(cause.message)
        if cause.exception_type == "rankzero.errors.ResultError":
            return ResultError(cause.message)
        others = policy.group_others(self._failures, cause)
        tail = self._recorder.tail(cause.rank)
        return WorkerFailedError(
            policy.failure_message(cause, others, tail, self._run.directory),
            rank=cause.rank,
            host=cause.host,
            exception_type=cause.exception_type,
            traceback=cause.traceback,
            exit_code=cause.exit_code,
            signal=cause.signal,
            log_tail=tail,
            others=others,
        )

    def _start_timeout(self) -> StartTimeoutError:
        tasks = self._session.num_agents
        missing = [f"task {task}" for task in range(tasks) if task not in self._agents]
        if missing:
            text = f"{len(missing)} of {tasks} tasks were not started: {', '.join(missing)}"
        else:
            missing = [
                f"rank {self._rank(task, {'local_rank': local_rank})}"
                for task, agent in self._agents.items()
                for local_rank in range(agent.join["workers"])
                if (task, local_rank) not in self._ready
            ] or ["rank 0"]
            text = f"every task was started, but {', '.join(missing)} not (is torch slow to import there?)"
        return StartTimeoutError(
            f"the ranks did not start within start_timeout={self._job.start_timeout} s: {text}", missing=missing
        )


_FAILURE_FACTS = ("exception_type", "message", "traceback", "exit_code", "signal", "collateral", "cause")


def look_interval(run: RunDirectory) -> float:
    """Seconds between two looks at the request to cancel."""
    return REMOTE_TICK if run.is_remote else TICK


def check_cancel(run: RunDirectory) -> None:
    """Raises RunCancelledError if somebody asked for the end."""
    if run.cancel_requested():
        raise RunCancelledError("the run was cancelled on request")
