"""One driver and many agents: the real driver, run directory and channel; agents that only speak the protocol.

Run: ``python benchmarks/control_plane.py [agents]``. Each agent joins, is told its ranks, beats every two
seconds, commits, and says goodbye. They live in a few processes of their own, one channel each, as real ones do.
"""

import importlib.metadata
import json
import os
import resource
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import Any

import psutil
from measure import Report

from rankzero import Launcher, LocalEngine
from rankzero.channel import messages
from rankzero.channel.client import ChannelClient
from rankzero.channel.messages import decode, encode
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

    def open(self, job: Job) -> "SimulatedSession":
        """A session of them."""
        return SimulatedSession(job, self.directory)


class SimulatedSession(EngineSession):
    """As many agents as ranks."""

    bind_host = driver_host = "127.0.0.1"

    def __init__(self, job: Job, directory: str) -> None:
        self._job = job
        self._processes = [start_process(directory, number) for number in range(PROCESSES)]
        for process in self._processes:
            process.stdout.readline()

    @property
    def place(self) -> str:
        """Its name in messages."""
        return "the simulation"

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


def be_agents(number: int, directory: str) -> None:
    """A share of the agents, in one loop; notes when each was told its ranks."""
    print("there", flush=True)
    config = json.loads(sys.stdin.readline())
    hosts, port = config["driver"]
    selector = selectors.DefaultSelector()
    torch = importlib.metadata.version("torch")
    clients, started = {}, {}
    for task in range(number, config["agents"], PROCESSES):
        client = clients[task] = ChannelClient(hosts, port, config["secret"], task)
        client.start()
        host, python = f"host{task // 8}", ".".join(map(str, sys.version_info[:3]))
        client.queue(encode(messages.Join(host, "127.0.0.1", host, os.getpid(), python, gpus=[], workers=1)))
        selector.register(client.fileno(), selectors.EVENT_READ, task)
    beating: dict[int, float] = {}
    committed = False
    value = ""
    ended = set()
    while len(ended) < len(clients):
        for key, _ in selector.select(0.05):
            task = key.data
            for message in map(decode, clients[task].receive()):
                if isinstance(message, messages.Assign):
                    started[task] = time.time() - config["go"]
                    value = os.path.join(message.run_directory, "result", f"value-{message.context['attempt']}.json")
                    clients[task].queue(encode(messages.Ready(torch), 0))
                    if message.first_rank == 0:
                        clients[task].queue(encode(messages.Rendezvous(1), 0))
                elif isinstance(message, messages.Go):
                    beating[task] = time.monotonic() + BEAT * task / config["agents"]
                elif isinstance(message, messages.End | messages.Stop):
                    ended.add(task)
        now = time.monotonic()
        for task, due in beating.items():
            if now >= due:
                beating[task] = due + BEAT
                clients[task].queue(encode(messages.Beat(int(now)), 0))
        if len(beating) == len(clients) and not committed and now - min(beating.values()) > -BEAT:
            committed = time.time() - config["go"] > max(started.values()) + SECONDS
            for task in clients if committed else ():
                clients[task].queue(encode(messages.Returned(time.time()), 0))
                clients[task].queue(encode(finish(task, value), 0))
    for client in clients.values():
        selector.unregister(client.fileno())
        client.close(5.0)
    with open(os.path.join(directory, f"started-{number}"), "w") as file:
        json.dump(list(started.values()), file)


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
        be_agents(int(sys.argv[2]), sys.argv[3])
    else:
        main()
