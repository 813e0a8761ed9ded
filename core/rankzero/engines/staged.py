"""The engine of a driver that is in the stage itself: the tasks are there, and start what they are told in a folder."""

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
        folder: Where driver and tasks meet; of this host.
        num_tasks: How many there are.
        host: The address of this task's executor, as Spark has it.
        stage_secret: Known to the tasks.
        place: Where the stage runs, in words.
        listener: On which agents of all attempts find the driver.
        own_identity: With what their connections are encrypted, if they are.
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
    def listen(told: dict[str, Any]) -> StageEngine:
        """The engine of a driver that was told this by its task.

        Raises:
            OSError: no port is free.
            EngineError: no certificate can be made.
        """
        identity = make_identity() if told["encrypts"] else None
        listener = listen(bind_address(told["host"]), told["ports"])
        return StageEngine(
            told["tasks"], told["num_tasks"], told["host"], told["secret"], told["place"], listener, identity
        )

    def announce(self, number: int) -> None:
        """Has the tasks start their agents of an attempt, which wait for its driver at the listener."""
        certificate = self.own_identity and base64.b64encode(self.own_identity.certificate).decode()
        where = {"driver": [self.hosts, self.listener.getsockname()[1]], "certificate": certificate}
        staged.put(self.folder, f"{staged.ATTEMPT}{number}", json.dumps(where))

    @property
    def hosts(self) -> list[str]:
        """The address by which Spark knows this executor, and the others of its host."""
        if self.host == LOOPBACK:
            return [LOOPBACK]
        return list(dict.fromkeys([self.host, *own_addresses(), socket.gethostname()]))

    def check(self, job: Job) -> None:
        """Nothing: the stage runs."""

    def to_spec(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Nobody makes it again."""
        return {"kind": "staged"}, {}

    def open(self, job: Job) -> StageSession:
        """The tasks, which are there."""
        return StageSession(self)


class StageSession(EngineSession):
    """The tasks of the stage."""

    def __init__(self, engine: StageEngine) -> None:
        self._engine = engine

    @property
    def place(self) -> str:
        """As whoever submitted the stage calls it."""
        return self._engine.place

    def slots(self) -> int:
        """One for each task."""
        return self._engine.num_tasks

    @property
    def most_slots(self) -> int | None:
        """No more ever."""
        return self._engine.num_tasks

    def num_agents(self, num_tasks: int) -> int:
        """One for each task."""
        return num_tasks

    @property
    def driver_host(self) -> str:
        """As Spark knows this executor."""
        return self._engine.host

    @property
    def driver_hosts(self) -> list[str]:
        """That, and the other addresses of its host."""
        return self._engine.hosts

    @property
    def bind_host(self) -> str:
        """Where it listens already: loopback where all tasks are of this host; else any address."""
        return str(self._engine.listener.getsockname()[0])

    def listen(self, ports: Sequence[int] | None) -> socket.socket:
        """There."""
        return self._engine.listener.dup()

    @property
    def encrypts(self) -> bool:
        """As whoever submitted the stage has decided."""
        return self._engine.own_identity is not None

    def identity(self) -> Identity:
        """That which the agents know."""
        assert self._engine.own_identity
        return self._engine.own_identity

    def secret(self, attempt: int) -> str:
        """As the tasks compute it."""
        return staged.attempt_secret(self._engine.stage_secret, attempt)

    def launch(self, num_tasks: int, config: AgentConfig, on_end: OnEnd) -> StageGroup:
        """Tells the tasks where this driver is."""
        return StageGroup(self._engine, config["attempt"], on_end)

    def close(self) -> None:
        """Nothing: the stage ends when this driver says so."""


class StageGroup(AgentGroup):
    """The agents of one attempt."""

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
        # As long as this process, which ends with its task.
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

    def note_farewell(self, task: int) -> None:
        """Sooner heard of than its task's report, for which Spark may take a second."""
        self._left.add(task)
        if len(self._left) == self._engine.num_tasks and not self._ended.is_set():
            self._ended.set()
            self._on_end(None)

    def cancel(self) -> None:
        """Has the tasks kill their agents."""
        staged.put(self._engine.folder, f"{staged.CANCEL}{self._number}", "")

    def explain(self, error: BaseException) -> RankZeroError:
        """The agent's own words."""
        return explain(str(error))
