"""The engine of a driver inside its own stage: the tasks are running, and start the agents of each attempt."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rankzero import bounds
from rankzero.channel.tls import make_identity
from rankzero.engines.base import AgentConfig, AgentGroup, Engine, EngineSession, OnEnd
from rankzero.engines.local import LOOPBACK
from rankzero.engines.spark.stage import explain
from rankzero.errors import RankZeroError
from rankzero.host.network import bind_address, listen, own_addresses
from rankzero.job import Job
from rankzero.task import stage


@dataclass(frozen=True)
class StageEngine(Engine):
    """The tasks of one running stage.

    Attributes:
        folder: Directory through which the driver and the tasks communicate.
        num_tasks: Number of tasks.
        host: Address of this task's executor, as Spark knows it.
        secret: A secret that the driver and the tasks share.
        place: Display name of the cluster.
        encrypts: True if connections are encrypted.
    """

    folder: str
    num_tasks: int
    host: str
    secret: str
    place: str
    encrypts: bool

    def check(self, job: Job) -> None:
        """Raises OSError or EngineError if no driver can listen for agents on this host."""
        listen(bind_address(self.host), job.ports).close()
        if self.encrypts:
            make_identity()

    def to_spec(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns a specification without details, since no other process opens this engine."""
        return {"kind": "stage"}, {}

    def open(self, job: Job, env: Mapping[str, str]) -> StageSession:
        """Returns a session with the running tasks."""
        return StageSession(self)


class StageSession(EngineSession):
    """A session whose tasks are those of the stage."""

    def __init__(self, engine: StageEngine) -> None:
        self._engine = engine
        self.place = engine.place
        self.most_slots = engine.num_tasks
        # The address by which Spark knows this executor, then the others of its host.
        others = [] if engine.host == LOOPBACK else [*own_addresses(), socket.gethostname()]
        self.driver_hosts = list(dict.fromkeys([engine.host, *others]))
        self.bind_host = bind_address(engine.host)
        self.encrypts = engine.encrypts

    def slots(self) -> int:
        """Returns the number of tasks in the stage."""
        return self._engine.num_tasks

    def launch(self, num_tasks: int, config: AgentConfig, on_end: OnEnd) -> StageGroup:
        """Sends the tasks the configuration of their agents, which they start."""
        return StageGroup(self._engine, config, on_end)

    def close(self) -> None:
        """Does nothing: the stage ends when this process exits."""


class StageGroup(AgentGroup):
    """The agents of one attempt in the stage."""

    def __init__(self, engine: StageEngine, config: AgentConfig, on_end: OnEnd) -> None:
        super().__init__()
        self._engine = engine
        self._attempt: int = config["attempt"]
        # The tasks have the user's environment already, which may hold secrets.
        settings = {name: value for name, value in config.items() if name != "env"}
        settings["secret"] = stage.sealed(config["secret"], engine.secret, self._attempt)
        stage.put(engine.folder, f"{stage.ATTEMPT}{self._attempt}", json.dumps(settings))
        self._hold(self._follow, on_end)

    def _follow(self) -> None:
        names = {f"{stage.ENDED}{self._attempt}-{task}" for task in range(self._engine.num_tasks)}
        # Without a time limit, since this process ends with its task.
        while not names <= set(os.listdir(self._engine.folder)):
            self._ended.wait(bounds.POLL_INTERVAL_SHORT)
        texts = []
        for name in sorted(names):
            with open(os.path.join(self._engine.folder, name)) as file:
                texts.append(file.read())
        if errors := [text for text in texts if text]:
            raise RuntimeError(errors[0])

    def cancel(self) -> None:
        """Makes the tasks kill their agents."""
        stage.put(self._engine.folder, f"{stage.CANCEL}{self._attempt}", "")

    def explain(self, error: BaseException) -> RankZeroError:
        """Returns the typed error for an agent's error text."""
        return explain(str(error))
