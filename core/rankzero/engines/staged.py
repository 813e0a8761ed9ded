"""The engine of a driver that is in the stage itself: the tasks are there, and start what they are told in a folder."""

from __future__ import annotations

import json
import os
import socket
import threading
from dataclasses import dataclass
from typing import Any

from rankzero.engines.base import AgentConfig, AgentGroup, Engine, EngineSession, OnEnd
from rankzero.engines.local import LOOPBACK
from rankzero.engines.spark.errors import explain
from rankzero.errors import RankZeroError
from rankzero.host.network import is_loopback, own_addresses
from rankzero.job import Job
from rankzero.task import staged

PRIVATE = ("secret", "env")
"""What the tasks know by themselves, and no file holds."""


@dataclass(frozen=True)
class StageEngine(Engine):
    """The tasks of one running stage.

    Attributes:
        folder: Where driver and tasks meet; of this host.
        num_tasks: How many there are.
        host: The address of this task's executor, as Spark has it.
        stage_secret: Known to the tasks.
        place: Where the stage runs, in words.
        encrypts: Its cluster encrypts its own connections.
    """

    folder: str
    num_tasks: int
    host: str
    stage_secret: str
    place: str
    encrypts: bool
    can_detach = False
    prefers_own_process = False

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
        if self._engine.host == LOOPBACK:
            return [LOOPBACK]
        return list(dict.fromkeys([self._engine.host, *own_addresses(), socket.gethostname()]))

    @property
    def bind_host(self) -> str:
        """Loopback where all tasks are of this host; else any address."""
        if is_loopback(self._engine.host):
            return LOOPBACK
        return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"

    @property
    def encrypts(self) -> bool:
        """As whoever submitted the stage was told."""
        return self._engine.encrypts

    def secret(self, attempt: int) -> str:
        """As the tasks compute it."""
        return staged.attempt_secret(self._engine.stage_secret, attempt)

    def launch(self, num_tasks: int, config: AgentConfig, on_end: OnEnd) -> StageGroup:
        """Tells the tasks where this driver is."""
        told = {name: value for name, value in config.items() if name not in PRIVATE}
        return StageGroup(self._engine, told, on_end)

    def close(self) -> None:
        """Nothing: the stage ends when this driver says so."""


class StageGroup(AgentGroup):
    """The agents of one attempt."""

    def __init__(self, engine: StageEngine, told: AgentConfig, on_end: OnEnd) -> None:
        super().__init__()
        self._engine = engine
        self._number = told["attempt"]
        self._on_end = on_end
        staged.put(engine.folder, f"{staged.ATTEMPT}{self._number}", json.dumps(told))
        threading.Thread(target=self._follow, name="rankzero-stage", daemon=True).start()

    def _follow(self) -> None:
        names = {f"{staged.ENDED}{self._number}-{task}" for task in range(self._engine.num_tasks)}
        tick = threading.Event()
        # As long as this process, which ends with its task.
        while not names <= set(os.listdir(self._engine.folder)):
            tick.wait(staged.ENDED_LOOK)
        texts = []
        for name in sorted(names):
            with open(os.path.join(self._engine.folder, name)) as file:
                texts.append(file.read())
        errors = [text for text in texts if text]
        self._ended.set()
        self._on_end(RuntimeError(errors[0]) if errors else None)

    def cancel(self) -> None:
        """Has the tasks kill their agents."""
        staged.put(self._engine.folder, f"{staged.CANCEL}{self._number}", "")

    def explain(self, error: BaseException) -> RankZeroError:
        """The agent's own words."""
        return explain(str(error))
