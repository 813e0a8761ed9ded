"""What supervision costs a training: steps per second under rankzero, beside the same ranks under torchrun, twice.

All trainings live at once and take turns of `TURN` seconds, since machines drift from minute to minute: those that wait
are stopped whole (SIGSTOP), ranks, agents and driver, so that what a training causes falls into its own turns.
Under rankzero there are heartbeats, a line of output and a report every ten steps; under torchrun the line alone. What
agent and driver use of the processor is measured beside it, since it would slow down a training that uses every core;
their share is that of half a minute without stops, since their work of every few seconds would fall into any turn.

Two processes that do the same differ by some percent, by where their memory came to lie and by what else the machine
did in their turns: the spread of the second torchrun over the first shows by how much. So all are launched many times,
for few turns each.

    python benchmarks/steps.py [launches]
"""

import contextlib
import itertools
import mmap
import os
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from measure import Report

from rankzero import Launcher

RANKS = 2
LAUNCHES = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 5
ROUNDS = 6
TURN = 0.6
"""Seconds. Well below `rankzero.bounds.CONNECTION_LOST_AFTER`, after which those who were stopped would be lost."""

STEADY = 30.0
SHARES = 2
"""Seconds of one training alone, in which the supervisors' share is measured, and launches in which it is: a report
page is written every 30 s."""

WAKING = 1.0
"""Seconds before that for what a training that was stopped has to do at once, such as a page that is due."""

SETTLED = 5.0
"""Seconds between the first steps of all trainings and the first turn."""

CASES = {"small": (64, True), "small, without reports": (64, False), "large": (1024, True)}
"""Width of the model's layers (a step takes a few milliseconds, or tens of them), and whether it reports."""

BARE = ("torchrun", "torchrun, again")
NAMES = (*BARE, "rankzero")
SUPERVISED = ("rankzero", "torchrun")


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


@dataclass
class Taken:
    """What one training did in its turns of one launch."""

    steps: int = 0
    seconds: float = 0.0
    trained: float = 0.0
    supervised: float = 0.0

    @property
    def rate(self) -> float:
        """Steps per second."""
        return self.steps / self.seconds

    @property
    def per_processor_second(self) -> float:
        """Steps per second of processor time of ranks and supervisors, which other tenants change less."""
        return self.steps / (self.trained + self.supervised)


@dataclass
class Training:
    """The processes of one of them."""

    ranks: list[psutil.Process]
    supervisors: list[psutil.Process]

    def send(self, number: int) -> None:
        """Sends a signal to all."""
        for process in (*self.supervisors, *self.ranks):
            process.send_signal(number)


def find(folder: Path, name: str, root: int) -> Training:
    """The training whose first process has the id `root`."""
    ranks = [look(folder, name, rank)[0] for rank in range(RANKS)]
    first = psutil.Process(root)
    everyone = [first, *first.children(recursive=True)]
    training = Training(
        [process for process in everyone if process.pid in ranks],
        [process for process in everyone if process.pid not in ranks],
    )
    assert len(training.ranks) == RANKS
    return training


def turn(folder: Path, name: str, training: Training, taken: Taken) -> None:
    """Lets one training go on for a turn."""
    trained, supervised = cpu_of(training.ranks), cpu_of(training.supervisors)
    (_, before), began = look(folder, name), time.perf_counter()
    training.send(signal.SIGCONT)
    time.sleep(TURN)
    training.send(signal.SIGSTOP)
    (_, after), ended = look(folder, name), time.perf_counter()
    taken.steps += after - before
    taken.seconds += ended - began
    taken.trained += cpu_of(training.ranks) - trained
    taken.supervised += cpu_of(training.supervisors) - supervised


def cpu_of(processes: list[psutil.Process]) -> float:
    """Seconds of processor time, as the scheduler counts them: clock ticks overrate what a timer wakes."""
    tasks = [task for process in processes for task in Path("/proc", str(process.pid), "task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def torchrun(folder: Path, name: str, width: int) -> subprocess.Popen[bytes]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += [__file__, "rank", str(folder), name, str(width)]
    with open(folder / f"{name}.log", "wb") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=log)


def share_of(training: Training) -> float:
    """The supervisors' part of the processor time of a training that runs alone, and was stopped for seconds only."""
    training.send(signal.SIGCONT)
    time.sleep(WAKING)
    trained, supervised = cpu_of(training.ranks), cpu_of(training.supervisors)
    time.sleep(STEADY)
    training.send(signal.SIGSTOP)
    trained, supervised = cpu_of(training.ranks) - trained, cpu_of(training.supervisors) - supervised
    return supervised / (trained + supervised)


def take_turns(width: int, reports: bool, shares: dict[str, list[float]] | None = None) -> dict[str, Taken]:
    """Launches the trainings and lets them take their turns; then measures ``shares``, if a dict is given for them."""
    with tempfile.TemporaryDirectory(prefix="rankzero-bench-") as directory:
        folder = Path(directory)
        bare = {name: torchrun(folder, name, width) for name in BARE}
        handle = Launcher(RANKS, store=folder / "store").submit(train, directory, "rankzero", width, reports)
        trainings: dict[str, Training] = {}
        try:
            deadline = time.monotonic() + 120
            while not all(look(folder, name, rank)[1] > 20 for name in NAMES for rank in range(RANKS)):
                assert time.monotonic() < deadline, [log.read_text() for log in folder.glob("*.log")]
                time.sleep(0.1)
            # A zygote loads the rest of torch five seconds after its ranks have started, once and for all.
            time.sleep(SETTLED)
            roots = {name: bare[name].pid if name in bare else handle.status().driver_pid for name in NAMES}
            trainings = {name: find(folder, name, roots[name]) for name in NAMES}
            for training in trainings.values():
                training.send(signal.SIGSTOP)
            taken = {name: Taken() for name in NAMES}
            for order in itertools.islice(itertools.cycle(itertools.permutations(NAMES)), ROUNDS):
                for name in order:
                    turn(folder, name, trainings[name], taken[name])
            if shares is not None:
                # rankzero's first: after half a minute of standing still its connections would be made again.
                for name in SUPERVISED:
                    shares.setdefault(name, []).append(share_of(trainings[name]))
            return taken
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError) as error:
            logs = [f"{log.name}: {log.read_text()[-2000:]}" for log in folder.glob("*.log")]
            raise RuntimeError(f"{error} of {trainings}, {handle.status()}; {logs}") from error
        finally:
            for training in trainings.values():
                for process in (*training.supervisors, *training.ranks):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.send_signal(signal.SIGCONT)
            handle.cancel()
            for process in bare.values():
                process.terminate()
            handle.wait(60)
            for process in bare.values():
                process.wait(60)


def measure(report: Report, size: str, width: int, reports: bool) -> None:
    shares: dict[str, list[float]] = {}
    launches = [take_turns(width, reports, shares if count < SHARES else None) for count in range(LAUNCHES)]
    what = f"{size} steps, supervisors' share of the processor time"
    for name in SUPERVISED:
        report.add(f"{what}, {name}", shares[name], "")
    report.hold(what, statistics.median(shares["rankzero"]), 0.01)
    for attribute, unit in {"rate": "steps/s", "per_processor_second": "steps per processor second"}.items():
        rates = {name: [getattr(taken[name], attribute) for taken in launches] for name in NAMES}
        for name in NAMES:
            report.add(f"{size} steps, {name}", rates[name], unit)
        bare = [statistics.mean(both) for both in zip(*(rates[name] for name in BARE), strict=True)]
        ratios = [ours / theirs for ours, theirs in zip(rates["rankzero"], bare, strict=True)]
        again = [second / first for first, second in zip(*(rates[name] for name in BARE), strict=True)]
        report.add(f"{size} steps, {unit}, torchrun / itself", again, "x")
        report.add(f"{size} steps, {unit}, rankzero / torchrun", ratios, "x")
        report.hold(f"{size} steps, {unit}, rankzero / torchrun", statistics.median(ratios), 0.99, at_least=True)


def main() -> None:
    report = Report("steps", "Training throughput under supervision")
    for size, (width, reports) in CASES.items():
        measure(report, size, width, reports)
    report.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        train(sys.argv[2], sys.argv[3], int(sys.argv[4]), False)
    else:
        main()
