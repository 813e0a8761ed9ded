"""One driver and many agents: the real driver, run directory and channel; agents that only speak the protocol.

Run: ``python benchmarks/control_plane.py [agents]``. Each agent joins, is told its ranks, beats every two
seconds, commits, and says goodbye. They live in a few processes of their own, one channel each, as real ones do.
"""

import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil
from measure import Report

from rankzero import Launcher, LocalEngine
from rankzero.channel import messages
from rankzero.channel.connection import Connection, Driver
from rankzero.engines.base import AgentConfig, AgentGroup, EngineSession, OnEnd
from rankzero.errors import EngineError, RankZeroError
from rankzero.job import Job
from rankzero.values import formats

AGENTS = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 1024
SECONDS = 10.0
PROCESSES = 4
BEAT = 2.0
RUNS = 5


@dataclass(frozen=True)
class SimulatedEngine(LocalEngine):
    """Places agents that only talk."""

    directory: str = ""

    def open(self, job: Job, env: Mapping[str, str]) -> "SimulatedSession":
        """A session of them."""
        return SimulatedSession(job, self.directory)


class SimulatedSession(EngineSession):
    """As many agents as ranks."""

    place = "the simulation"
    bind_host = "127.0.0.1"

    def __init__(self, job: Job, directory: str) -> None:
        self._job = job
        self.driver_hosts = [self.bind_host]
        self._processes = [start_process(directory, number) for number in range(PROCESSES)]
        for process in self._processes:
            process.stdout.readline()

    def slots(self) -> int:
        """As many as the job needs."""
        return self._job.num_tasks

    def num_agents(self, num_tasks: int) -> int:
        """One for each task."""
        return num_tasks

    def launch(self, num_tasks: int, config: AgentConfig, on_end: OnEnd) -> "SimulatedGroup":
        """Lets them go."""
        for process in self._processes:
            process.stdin.write(json.dumps({**config, "agents": num_tasks, "go": time.time()}) + "\n")
            process.stdin.flush()
        return SimulatedGroup(self._processes, on_end)

    def close(self) -> None:
        """Ends them."""
        for process in self._processes:
            process.kill()
            process.wait()


def start_process(directory: str, number: int) -> Any:
    command = [sys.executable, __file__, "agents", str(number), directory]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


class SimulatedGroup(AgentGroup):
    """Ends when they have."""

    def __init__(self, processes: list[Any], on_end: OnEnd) -> None:
        super().__init__()

        def wait() -> None:
            codes = [process.wait() for process in processes]
            self._ended.set()
            on_end(None if codes == [0] * len(codes) else RuntimeError(f"agents ended by {codes}"))

        threading.Thread(target=wait, daemon=True).start()

    def cancel(self) -> None:
        """Nothing: `SimulatedSession.close` does it."""

    def explain(self, error: BaseException) -> RankZeroError:
        """Its text."""
        return EngineError(str(error))


async def be_agents(number: int, directory: str) -> None:
    """A share of the agents, in one loop; notes when each was told its ranks."""
    print("there", flush=True)
    config = json.loads(sys.stdin.readline())
    started: dict[int, float] = {}
    tasks = range(number, config["agents"], PROCESSES)
    await asyncio.gather(*(be_agent(task, config, started) for task in tasks))
    with open(os.path.join(directory, f"started-{number}"), "w") as file:
        json.dump(list(started.values()), file)


async def be_agent(task: int, config: dict[str, Any], started: dict[int, float]) -> None:
    """One agent: joins, beats, and finishes together with the others."""
    hosts, port = config["driver"]
    python = ".".join(map(str, sys.version_info[:3]))
    driver = Driver(hosts, port, config["secret"])
    connection = await driver.find(task, 60.0)
    keeping = asyncio.create_task(connection.keep("the driver"))
    host = f"host{task // 8}"
    connection.send(messages.Join(host, "127.0.0.1", host, python, gpus=[], workers=1))
    working, path = None, ""
    async for message, _ in connection.messages():
        if isinstance(message, messages.Assign):
            started[task] = time.time() - config["go"]
            path = os.path.join(message.run_directory, "result", f"value-{message.context['attempt']}.json")
            connection.send(messages.Reached("ready"), 0)
            if message.first_rank == 0:
                connection.send(messages.Reached("bound", {"port": 1}), 0)
        elif isinstance(message, messages.Go):
            working = asyncio.create_task(work(task, config, connection, path))
        elif isinstance(message, messages.End | messages.Stop):
            connection.send(messages.Bye())
            break
    keeping.cancel()
    connection.close()
    assert working is not None


async def work(task: int, config: dict[str, Any], connection: Connection, path: str) -> None:
    """Beats for some seconds, and reports the end."""
    end = time.monotonic() + SECONDS
    await asyncio.sleep(BEAT * task / config["agents"])
    while time.monotonic() < end:
        connection.send(messages.Beat(int(time.monotonic())), 0)
        await asyncio.sleep(BEAT)
    connection.send(messages.Reached("returned", {"time": time.time()}), 0)
    connection.send(finish(task, path), 0)


def finish(task: int, path: str) -> messages.Finished:
    """What a rank says when it has written everything: rank 0 its value, too."""
    if task:
        return messages.Finished(time.time())
    size, digest = formats.write(1, "json", path)
    result = {"format": "json", "size": size, "digest": digest, "path": path, "summary": {}, "value": 1}
    return messages.Finished(time.time(), result)


def main() -> None:
    report = Report("control_plane", f"{AGENTS} agents and one driver")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, AGENTS + 512)), hard))
    me = psutil.Process()
    joined, shares, ends, memory = [], [], [], 0.0
    for _ in range(RUNS):
        with tempfile.TemporaryDirectory(prefix="rankzero-bench-") as directory:
            launcher = Launcher(AGENTS, engine=SimulatedEngine(directory), store=directory, run_id="run")
            cpu, began = sum(me.cpu_times()[:2]), time.perf_counter()
            assert launcher.run(int) == 1
            took = time.perf_counter() - began
            shares.append((sum(me.cpu_times()[:2]) - cpu) / took)
            times = [json.load(open(os.path.join(directory, f"started-{number}"))) for number in range(PROCESSES)]
            joined.append(max(max(part) for part in times))
            assert sum(map(len, times)) == AGENTS
            ends.append(took - joined[-1] - SECONDS)
            memory = max(memory, me.memory_info().rss / (1 << 20))
    seconds = report.add("from the launch until every agent has joined and knows its ranks", joined)
    report.add("everything else: opening, commit, farewells, closing", ends)
    share = report.add(f"driver's processor time over the run of {SECONDS:g} s and more", shares, "cores")
    report.add("memory of the driver's process", [memory], "MB")
    report.hold("joined, s", seconds, 2.0)
    report.hold("cores", share, 1.0)
    report.hold("MB", memory, 500)
    report.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["agents"]:
        asyncio.run(be_agents(int(sys.argv[2]), sys.argv[3]))
    else:
        main()
