"""The end of a run whose success is certain, on a host where a rank's process cannot be reaped."""

import asyncio
import platform
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.conftest import until

from rankzero import EngineError, Launcher, LocalEngine, RankZeroError
from rankzero.channel.client import Driver
from rankzero.channel.connection import Connection
from rankzero.channel.messages import Assign, End, Finished, Join, Ready, Rendezvous, Returned, Usage
from rankzero.engines.base import AgentConfig, AgentGroup, OnEnd
from rankzero.engines.local import LocalSession
from rankzero.job import Job
from rankzero.values import formats

WAIT = 30.0

SAMPLE_INTERVAL = 0.05
"""Seconds between two samples of the agent, many of which fit into the driver's time limit."""


@dataclass(frozen=True)
class StuckEngine(LocalEngine):
    """This machine, whose agent reports a finished rank and then samples the host forever. For `Launcher.run`."""

    folder: str = ""

    def open(self, job: Job) -> "StuckSession":
        """Returns a session with such an agent."""
        return StuckSession(job, self.folder)


class StuckSession(LocalSession):
    """Starts the agent in a thread of this process."""

    def __init__(self, job: Job, folder: str) -> None:
        super().__init__(job)
        self._folder = folder

    def launch(self, num_tasks: int, config: AgentConfig, on_end: OnEnd) -> AgentGroup:
        """Starts the agent."""
        return StuckAgent(config, self._folder, on_end)


class StuckAgent(AgentGroup):
    """The agent of one rank that has finished, whose process the kernel does not end."""

    def __init__(self, config: AgentConfig, folder: str, on_end: OnEnd) -> None:
        super().__init__()
        hosts, port = config["driver"]
        self._driver = Driver(hosts, port, config["secret"])
        self._folder = folder
        self._on_end = on_end
        self._cancelled = threading.Event()
        threading.Thread(target=self._work, daemon=True).start()

    def cancel(self) -> None:
        """Ends the agent, which alone the driver can do."""
        Path(self._folder, "cancelled").touch()
        self._cancelled.set()

    def explain(self, error: BaseException) -> RankZeroError:
        """Returns an error that no test expects."""
        return EngineError(str(error))

    def _work(self) -> None:
        asyncio.run(self._live())
        self._ended.set()
        self._on_end(None)

    async def _live(self) -> None:
        connection = await self._driver.find(0, WAIT)
        join = Join("127.0.0.1", "127.0.0.1", "here", pid=1, python=platform.python_version(), gpus=[], workers=1)
        connection.send(join)
        async for message, _ in connection.messages():
            if isinstance(message, Assign):
                self._finish(connection)
            if isinstance(message, End):
                break
        while not (self._cancelled.is_set() or Path(self._folder, "stop").exists()):
            await asyncio.sleep(SAMPLE_INTERVAL)
            connection.send(Usage({"time": time.time(), "cores": 1}))
            Path(self._folder, "sampled").touch()
        connection.close()

    def _finish(self, connection: Connection) -> None:
        path = f"{self._folder}/value.json"
        size, digest = formats.write(7, formats.JSON, path)
        result = {"format": formats.JSON, "size": size, "digest": digest, "path": path, "summary": {}, "value": 7}
        now = time.time()
        for message in (Rendezvous(port=1), Ready(torch=""), Returned(now), Finished(now, result)):
            connection.send(message, 0)


def test_samples_of_a_host_do_not_delay_the_end_of_a_run_whose_rank_cannot_be_reaped(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankzero.bounds.SUCCESS_END_TIMEOUT", lambda: 20 * SAMPLE_INTERVAL)
    launcher = launcher.options(num_processes=1, engine=StuckEngine(folder=str(tmp_path)), exit_timeout=0.1)
    with ThreadPoolExecutor(1) as executor:
        value = executor.submit(lambda: launcher.run(int))
        until(lambda: (tmp_path / "sampled").exists() or value.done(), WAIT, "a sample")
        try:
            until((tmp_path / "cancelled").exists, WAIT, "the driver's end of the agent")
        finally:
            (tmp_path / "stop").touch()
        assert value.result(WAIT) == 7
