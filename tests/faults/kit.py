"""Tools to hurt a run and to see what is left of it; shared by the matrix and other tests."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import rankzero
from rankzero import LocalEngine, RankZeroError, RunHandle
from rankzero.engines.base import AgentConfig, AgentGroup, OnEnd
from rankzero.engines.local import LOOPBACK, LocalGroup, LocalSession
from rankzero.job import Job
from rankzero.values import formats


@dataclass(frozen=True)
class Arrival:
    """A rank that stands at a moment."""

    pid: int
    agent: int


def arrival(folder: Path, moment: str) -> Arrival | None:
    """The rank that arrived there, if one has."""
    with contextlib.suppress(FileNotFoundError):
        return Arrival(**json.loads((folder / f"at-{moment}").read_text()))
    return None


def reported(folder: Path) -> int:
    """The step of the last checkpoint that rank 0 reported; -1 for none."""
    with contextlib.suppress(FileNotFoundError):
        return int((folder / "reported").read_text())
    return -1


def newest_step(handle: RunHandle[Any]) -> int:
    """Loads the newest committed checkpoint and gives its step; -1 if there is none. Raises ResultError."""
    # A checkpoint that is pruned between the list and the load is not the newest: look again.
    for _ in range(5):
        manifests = handle.checkpoints()
        if not manifests:
            return -1
        newest = manifests[-1]
        part = newest.parts["0"]
        path = os.path.join(newest.folder, part["file"])
        try:
            return int(formats.read(path, part["format"], part["sha256"])["step"])
        except FileNotFoundError:
            continue
    raise AssertionError(f"the newest checkpoint of {handle.directory} cannot be opened")


def executor_of(agent: int) -> int:
    """The JVM of the executor whose Python worker holds an agent."""
    return next(parent.pid for parent in psutil.Process(agent).parents() if parent.name() == "java")


def is_stopped(pid: int) -> bool:
    """True if a process was stopped by a signal."""
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


class Proxy:
    """Stands between agents and their driver: forwards, cuts, holds back, and heals.

    Where the driver is stands in a file, since another process may open it, for each attempt anew.
    """

    OPEN, DEAF, SHUT = "open", "deaf", "shut"

    def __init__(self, file: Path) -> None:
        self.file = file
        self._mode = self.OPEN
        self.seen = bytearray()
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._lock = threading.Lock()
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port = int(self._listener.getsockname()[1])
        self._woken, self._wake = socket.socketpair()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="proxy", daemon=True)
        self._thread.start()

    def cut(self) -> int:
        """Resets every connection, once; the number of connections that there were."""
        with self._lock:
            count = len(self._pairs) // 2
            for end in list(self._pairs):
                # As a router that forgot them: both ends get a reset.
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                end.close()
            self._pairs.clear()
            self._nudge()
        return count

    def shut(self) -> None:
        """Cuts, and lets nobody through any more."""
        self._mode = self.SHUT
        self.cut()

    def deafen(self) -> None:
        """Keeps the connections, and holds back what they carry: nobody is told."""
        self._mode = self.DEAF
        self._nudge()

    def heal(self) -> None:
        """Forwards again, first what was held back, as TCP does after a cut of the network."""
        self._mode = self.OPEN
        self._nudge()

    def close(self) -> None:
        """Ends the thread."""
        self._closing = True
        self.cut()
        self._thread.join(5)
        self._listener.close()
        self._woken.close()
        self._wake.close()

    def _nudge(self) -> None:
        self._wake.send(b"\0")

    def _work(self) -> None:
        while not self._closing:
            with self._lock:
                ends = list(self._pairs) if self._mode != self.DEAF else []
            try:
                ready, _, _ = select.select([self._listener, self._woken, *ends], [], [])
            except (OSError, ValueError):
                continue  # One was cut meanwhile.
            for end in ready:
                if end is self._woken:
                    self._woken.recv(64)
                elif end is self._listener:
                    self._accept()
                else:
                    self._forward(end)

    def _accept(self) -> None:
        agent, _ = self._listener.accept()
        try:
            driver = socket.create_connection((LOOPBACK, int(self.file.read_text())), 1)
            if self._mode == self.SHUT:
                driver.close()
                raise ConnectionRefusedError
        except (OSError, ValueError):
            agent.close()
            return
        with self._lock:
            self._pairs[agent], self._pairs[driver] = driver, agent

    def _forward(self, end: socket.socket) -> None:
        try:
            data = end.recv(1 << 16)
            other = self._pairs[end]
            if data:
                self.seen += data
                other.sendall(data)
                return
        except (OSError, KeyError):
            pass
        with self._lock:
            if other := self._pairs.pop(end, None):
                self._pairs.pop(other, None)
                other.close()
            end.close()


@dataclass(frozen=True)
class ProxyEngine(LocalEngine):
    """This machine, with a `Proxy` between agent and driver. For `Launcher.run`, whose driver is in this process."""

    port: int = 0
    file: str = ""

    def open(self, job: Job, env: Mapping[str, str]) -> ProxySession:
        """A session whose agents are sent to the proxy."""
        return ProxySession(job, self)


class ProxySession(LocalSession):
    """Tells the proxy where the driver is, and the agent where the proxy is."""

    def __init__(self, job: Job, engine: ProxyEngine) -> None:
        super().__init__(job)
        self._engine = engine

    def launch(self, num_tasks: int, config: AgentConfig, on_end: OnEnd) -> AgentGroup:
        """Starts the agent."""
        _, port = config["driver"]
        Path(self._engine.file).write_text(str(port))
        return super().launch(num_tasks, {**config, "driver": [[LOOPBACK], self._engine.port]}, on_end)


@dataclass(frozen=True)
class SlotsEngine(LocalEngine):
    """This machine, with as many slots as a file says. For `Launcher.run`, whose driver is in this process."""

    file: str = ""

    def open(self, job: Job, env: Mapping[str, str]) -> SlotsSession:
        """A session that reads the file whenever it is asked."""
        return SlotsSession(job, self.file)


class SlotsSession(LocalSession):
    """A cluster that grows and shrinks as the test says."""

    def __init__(self, job: Job, file: str) -> None:
        super().__init__(job)
        self._file = Path(file)
        self._slots = 0

    def slots(self) -> int:
        """What the file says, or what it said: whoever writes to it empties it first."""
        if text := self._file.read_text():
            self._slots = int(text)
        return self._slots


@dataclass(frozen=True)
class TasksEngine(LocalEngine):
    """This machine, with an agent for each rank, as clusters have them. For `Launcher.run`."""

    def open(self, job: Job, env: Mapping[str, str]) -> TasksSession:
        """A session of several agents."""
        return TasksSession(job)


class TasksSession(LocalSession):
    """Each task has one rank."""

    def num_agents(self, num_tasks: int) -> int:
        """As many as tasks."""
        return num_tasks

    def launch(self, num_tasks: int, config: AgentConfig, on_end: OnEnd) -> AgentGroup:
        """Starts the agents."""
        common = {
            **config,
            "host": LOOPBACK,
            "workers": 1,
            "gpus": [],
            "cores": 1,
            "owner": os.getpid(),
            "code_path": str(Path(rankzero.__file__).parents[1]),
        }
        return TasksGroup([{**common, "task": task} for task in range(num_tasks)], on_end)


class TasksGroup(AgentGroup):
    """Agents that end one by one."""

    def __init__(self, configs: Sequence[AgentConfig], on_end: OnEnd) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._left = len(configs)
        self._error: BaseException | None = None
        self._on_end = on_end
        self._groups = [LocalGroup(config, self._on_one_end) for config in configs]

    def _on_one_end(self, error: BaseException | None) -> None:
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            is_last = not self._left
        if is_last:
            self._ended.set()
            self._on_end(self._error)

    def cancel(self) -> None:
        """Kills them all."""
        for group in self._groups:
            group.cancel()

    def explain(self, error: BaseException) -> RankZeroError:
        """As of a single one."""
        return self._groups[0].explain(error)
