"""What supervision costs a training: steps per second under rankzero, beside the same ranks under torchrun.

Both trainings live at once and take turns of `TURN` seconds, since machines drift from minute to minute: the ranks of
the one that waits are stopped (SIGSTOP). A pair is one turn of each. Under rankzero there are heartbeats, a line of
output and a report every ten steps; under torchrun the line alone. What agent and driver use of the processor is
measured beside it, since it would slow down a training that uses every core.

Two processes that do the same differ by some percent, by where their memory came to lie; so both are launched several
times.

    python benchmarks/steps.py [launches]
"""

import mmap
import os
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from measure import Report

from rankzero import Launcher

RANKS = 2
LAUNCHES = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 4
PAIRS = 5
TURN = 2.0
SETTLE = 0.3
CASES = {"small": (64, True), "small, without reports": (64, False), "large": (1024, True)}
"""Width of the model's layers (a step takes a few milliseconds, or tens of them), and whether it reports."""

NAMES = ("torchrun", "rankzero")


def train(folder: str, name: str, width: int, reports: bool) -> None:
    """Steps of a DDP model for ever; rank 0 counts them in a file that is mapped."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)]
    parallel = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    data, labels = torch.randn(64, width), torch.randint(0, 10, (64,))
    rank = dist.get_rank()
    with open(Path(folder, f"{name}-{rank}"), "w+b") as file:
        file.write(struct.pack("<qq", os.getpid(), 0))
        file.flush()
        counter = mmap.mmap(file.fileno(), 16)
    step = 0
    while True:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(parallel(data), labels)
        loss.backward()
        optimizer.step()
        step += 1
        counter[8:] = struct.pack("<q", step)
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
            if reports:
                import rankzero.train as rt

                rt.report({"loss": loss.item(), "step": step})


def look(folder: Path, name: str, rank: int = 0) -> tuple[int, int]:
    """A rank's process id and count of steps; zeros before it has begun."""
    try:
        return struct.unpack("<qq", (folder / f"{name}-{rank}").read_bytes())  # type: ignore[return-value]
    except (FileNotFoundError, struct.error):
        return 0, 0


def turn(folder: Path, name: str, supervisors: list[psutil.Process]) -> tuple[float, float, float]:
    """Lets one training go on for a turn.

    Returns:
        Its steps per second; its steps per second of processor time that its ranks and supervisors used, which other
        tenants of the machine change less; and the supervisors' share of that time, which they do not change.
    """
    ranks = [look(folder, name, rank)[0] for rank in range(RANKS)]
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    time.sleep(SETTLE)
    workers = [psutil.Process(pid) for pid in ranks]
    (_, before), began = look(folder, name), time.perf_counter()
    trained, supervised = cpu_of(workers), cpu_of(supervisors)
    time.sleep(TURN)
    (_, after), ended = look(folder, name), time.perf_counter()
    trained, supervised = cpu_of(workers) - trained, cpu_of(supervisors) - supervised
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    used = trained + supervised
    return (after - before) / (ended - began), (after - before) / used, supervised / used


def cpu_of(processes: list[psutil.Process]) -> float:
    """Seconds of processor time, as the scheduler counts them: clock ticks overrate what a timer wakes."""
    tasks = [task for process in processes for task in Path("/proc", str(process.pid), "task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


Turns = dict[str, list[tuple[float, float, float]]]


def take_turns(width: int, reports: bool, turns: Turns) -> None:
    """Launches both trainings and adds their turns."""
    with tempfile.TemporaryDirectory(prefix="rankzero-bench-") as directory:
        folder = Path(directory)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with open(folder / "torchrun.log", "wb") as log:
            command += [__file__, "rank", directory, str(width)]
            bare = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        handle = Launcher(RANKS, store=folder / "store").submit(train, directory, "rankzero", width, reports)
        try:
            deadline = time.monotonic() + 120
            while not all(look(folder, name, rank)[1] > 20 for name in NAMES for rank in range(RANKS)):
                assert time.monotonic() < deadline, (folder / "torchrun.log").read_text()
                time.sleep(0.1)
            for name in NAMES:
                turn(folder, name, [])
            driver = psutil.Process(handle.status().driver_pid)
            below = driver.children(recursive=True)
            supervisors = [driver, *(process for process in below if "agent.supervise" in " ".join(process.cmdline()))]
            for pair in range(PAIRS):
                for name in NAMES if pair % 2 else reversed(NAMES):
                    turns[name].append(turn(folder, name, supervisors if name == "rankzero" else []))
        finally:
            for name in NAMES:
                for rank in range(RANKS):
                    if pid := look(folder, name, rank)[0]:
                        os.kill(pid, signal.SIGCONT)
            handle.cancel()
            bare.terminate()
            handle.wait(60)
            bare.wait(60)


def measure(report: Report, size: str, width: int, reports: bool) -> None:
    turns: Turns = {name: [] for name in NAMES}
    for _ in range(LAUNCHES):
        take_turns(width, reports, turns)
    share = [turn[2] for turn in turns["rankzero"]]
    report.add(f"{size} steps, supervisors' share of the processor time", share, "")
    report.hold(f"{size} steps, supervisors' share of the processor time", statistics.median(share), 0.01)
    for place, unit in enumerate(("steps/s", "steps per processor second")):
        rates = {name: [pair[place] for pair in turns[name]] for name in NAMES}
        for name in NAMES:
            report.add(f"{size} steps, {name}", rates[name], unit)
        ratios = [ours / theirs for ours, theirs in zip(rates["rankzero"], rates["torchrun"], strict=True)]
        report.add(f"{size} steps, {unit}, ratio of each pair", ratios, "x")
        report.hold(f"{size} steps, {unit}, rankzero / torchrun", statistics.median(ratios), 0.99, at_least=True)


def main() -> None:
    report = Report("steps", "Training throughput under supervision")
    for size, (width, reports) in CASES.items():
        measure(report, size, width, reports)
    report.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        train(sys.argv[2], "torchrun", int(sys.argv[3]), False)
    else:
        main()
