"""The end of a run whose success is certain, on a host where a rank's process cannot be reaped."""

import platform
import select
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.conftest import until

from rankzero import EngineError, Launcher, LocalEngine, RankZeroError
from rankzero.channel.client import ChannelClient, ChannelClosed
from rankzero.channel.messages import Assign, End, Finished, Join, Ready, Rendezvous, Returned, Usage, decode, encode
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
        self._client = ChannelClient(hosts, port, config["secret"], 0)
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
        self._client.start()
        join = Join("127.0.0.1", "127.0.0.1", "here", pid=1, python=platform.python_version(), gpus=[], workers=1)
        self._client.queue(encode(join))
        try:
            self._await(Assign)
            self._finish()
            self._await(End)
            while not (self._cancelled.wait(SAMPLE_INTERVAL) or Path(self._folder, "stop").exists()):
                self._client.queue(encode(Usage({"time": time.time(), "cores": 1})))
                Path(self._folder, "sampled").touch()
        except ChannelClosed:
            pass
        self._client.close(0.0)
        self._ended.set()
        self._on_end(None)

    def _await(self, kind: type) -> None:
        while not self._cancelled.is_set():
            select.select([self._client.fileno()], [], [], 0.1)
            if any(isinstance(decode(message), kind) for message in self._client.receive()):
                return

    def _finish(self) -> None:
        path = f"{self._folder}/value.json"
        size, digest = formats.write(7, formats.JSON, path)
        result = {"format": formats.JSON, "size": size, "digest": digest, "path": path, "summary": {}, "value": 7}
        now = time.time()
        for message in (Rendezvous(port=1), Ready(torch=""), Returned(now), Finished(now, result)):
            self._client.queue(encode(message, local_rank=0))


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
