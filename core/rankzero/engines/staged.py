"""The engine of a driver inside its own stage: the tasks are running, and start agents that a folder announces."""

from __future__ import annotations

import base64
import json
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rankzero.channel.driver_end.tls import Identity, make_identity
from rankzero.channel.sockets import listen
from rankzero.engines.base import AgentConfig, AgentGroup, Engine, EngineSession, OnEnd
from rankzero.engines.local import LOOPBACK
from rankzero.engines.spark.errors import explain
from rankzero.errors import RankZeroError
from rankzero.host.network import bind_address, own_addresses
from rankzero.job import Job
from rankzero.task import staged


@dataclass(frozen=True)
class StageEngine(Engine):
    """The tasks of one running stage.

    Attributes:
        folder: Directory of this host through which the driver and the tasks communicate.
        num_tasks: Number of tasks.
        host: Address of this task's executor, as Spark knows it.
        stage_secret: A secret that the tasks share.
        place: Display name of the cluster.
        listener: Socket on which the agents of all attempts reach the driver.
        own_identity: Certificate and key of encrypted connections; None for plain ones.
    """

    folder: str
    num_tasks: int
    host: str
    stage_secret: str
    place: str
    listener: socket.socket
    own_identity: Identity | None
    can_detach = False
    prefers_own_process = False

    @staticmethod
    def listen(stage: dict[str, Any]) -> StageEngine:
        """Returns the engine of a driver from the description of the stage that its task sent.

        Raises:
            OSError: no port is free.
            EngineError: no certificate can be made.
        """
        identity = make_identity() if stage["encrypts"] else None
        listener = listen(bind_address(stage["host"]), stage["ports"])
        return StageEngine(
            stage["tasks"], stage["num_tasks"], stage["host"], stage["secret"], stage["place"], listener, identity
        )

    def announce(self, number: int) -> None:
        """Makes the tasks start their agents of an attempt, which connect to the driver's listener."""
        certificate = self.own_identity and base64.b64encode(self.own_identity.certificate).decode()
        where = {"driver": [self.hosts, self.listener.getsockname()[1]], "certificate": certificate}
        staged.put(self.folder, f"{staged.ATTEMPT}{number}", json.dumps(where))

    @property
    def hosts(self) -> list[str]:
        """The address by which Spark knows this executor, then the other addresses of its host."""
        if self.host == LOOPBACK:
            return [LOOPBACK]
        return list(dict.fromkeys([self.host, *own_addresses(), socket.gethostname()]))

    def check(self, job: Job) -> None:
        """Does nothing, since the stage is running already."""

    def to_spec(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns a specification without details, since no other process opens this engine."""
        return {"kind": "staged"}, {}

    def open(self, job: Job) -> StageSession:
        """Returns a session with the running tasks."""
        return StageSession(self)


class StageSession(EngineSession):
    """A session whose tasks are those of the stage."""

    def __init__(self, engine: StageEngine) -> None:
        self._engine = engine

    @property
    def place(self) -> str:
        """Display name of the cluster, as the submitter gave it."""
        return self._engine.place

    def slots(self) -> int:
        """Returns the number of tasks in the stage."""
        return self._engine.num_tasks

    @property
    def most_slots(self) -> int | None:
        """The number of tasks in the stage, which is fixed."""
        return self._engine.num_tasks

    def num_agents(self, num_tasks: int) -> int:
        """Returns one agent for each task."""
        return num_tasks

    @property
    def driver_host(self) -> str:
        """The address by which Spark knows this executor."""
        return self._engine.host

    @property
    def driver_hosts(self) -> list[str]:
        """The addresses of the driver, the one by which Spark knows this executor first."""
        return self._engine.hosts

    @property
    def bind_host(self) -> str:
        """The address of the listening socket: loopback if all tasks run on this host, else any address."""
        return str(self._engine.listener.getsockname()[0])

    def listen(self, ports: Sequence[int] | None) -> socket.socket:
        """Returns the socket that the stage's driver already listens on."""
        return self._engine.listener.dup()

    @property
    def encrypts(self) -> bool:
        """True if the submitter chose encrypted connections for the stage."""
        return self._engine.own_identity is not None

    def identity(self) -> Identity:
        """Returns the certificate that `StageEngine.announce` sends to the agents, with its key."""
        assert self._engine.own_identity
        return self._engine.own_identity

    def secret(self, attempt: int) -> str:
        """Returns the secret of one attempt, which the tasks compute from that of the stage."""
        return staged.attempt_secret(self._engine.stage_secret, attempt)

    def launch(self, num_tasks: int, config: AgentConfig, on_end: OnEnd) -> StageGroup:
        """Announces the attempt to the tasks, which start their agents."""
        return StageGroup(self._engine, config["attempt"], on_end)

    def close(self) -> None:
        """Does nothing: the stage ends when the driver writes its final status."""


class StageGroup(AgentGroup):
    """The agents of one attempt in the stage."""

    def __init__(self, engine: StageEngine, number: int, on_end: OnEnd) -> None:
        super().__init__()
        self._engine = engine
        self._number = number
        self._on_end = on_end
        self._left: set[int] = set()
        engine.announce(number)
        threading.Thread(target=self._follow, name="rankzero-stage", daemon=True).start()

    def _follow(self) -> None:
        names = {f"{staged.ENDED}{self._number}-{task}" for task in range(self._engine.num_tasks)}
        tick = threading.Event()
        # Without a time limit, since this process ends with its task.
        while not names <= set(os.listdir(self._engine.folder)):
            if self._ended.is_set():
                return
            tick.wait(staged.ENDED_POLL_INTERVAL)
        texts = []
        for name in sorted(names):
            with open(os.path.join(self._engine.folder, name)) as file:
                texts.append(file.read())
        errors = [text for text in texts if text]
        self._ended.set()
        self._on_end(RuntimeError(errors[0]) if errors else None)

    def note_disconnect(self, task: int) -> None:
        """Records that an agent has finished, which arrives before its task's report: Spark may take a second."""
        self._left.add(task)
        if len(self._left) == self._engine.num_tasks and not self._ended.is_set():
            self._ended.set()
            self._on_end(None)

    def cancel(self) -> None:
        """Makes the tasks kill their agents."""
        staged.put(self._engine.folder, f"{staged.CANCEL}{self._number}", "")

    def explain(self, error: BaseException) -> RankZeroError:
        """Returns the typed error for an agent's error text."""
        return explain(str(error))
