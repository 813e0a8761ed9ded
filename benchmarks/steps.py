"""What supervision costs a training: steps per second under rankzero, beside the same ranks under torchrun.

Both trainings live at once and take turns of `TURN` seconds, since machines drift from minute to minute: a file says
whose turn it is, and the ranks of the other wait for it between two blocks of steps. A pair is one turn of each.
Under rankzero there are heartbeats, a line of output and a report every ten steps. What agent and driver use of the
processor meanwhile is measured beside it, since it would slow down a training that uses every core.

    python benchmarks/steps.py [pairs]
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from measure import Report

from rankzero import Launcher

RANKS = 2
PAIRS = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 20
TURN = 2.0
BLOCK = 10
SIZES = {"small": 64, "large": 1024}
"""Width of the model's layers: a step takes one or two milliseconds, or tens of them."""


def train(folder: str, name: str, width: int, supervised: bool) -> None:
    """Steps of a DDP model, in its turns, until the file ``end`` is there; writes steps per second of each turn."""
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
    lead = dist.get_rank() == 0
    turn, state = Path(folder, "turn"), torch.zeros(1)
    count, busy, step, turns = 0, 0.0, 0, 0
    while True:
        if lead:
            # 0: wait, 1: go on, 2: the end.
            state[0] = 2.0 if Path(folder, "end").exists() else float(turn.read_text() == name)
        dist.broadcast(state, 0)
        if state.item() != 1.0:
            if lead and count:
                with open(Path(folder, f"{name}-turns"), "a") as file:
                    file.write(f"{count / busy}\n")
                turns += 1
                count, busy = 0, 0.0
            if state.item() == 2.0:
                break
            time.sleep(0.005)
            continue
        started = time.perf_counter()
        for _ in range(BLOCK):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(parallel(data), labels)
            loss.backward()
            optimizer.step()
        step += BLOCK
        print(f"step {step} loss {loss.item():.4f}", flush=True)
        if supervised:
            import rankzero.train as rt

            rt.report({"loss": loss.item(), "step": step})
        count, busy = count + BLOCK, busy + time.perf_counter() - started
    dist.destroy_process_group()


def cpu_of(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measure(report: Report, size: str, width: int) -> None:
    with tempfile.TemporaryDirectory(prefix="rankzero-bench-") as directory:
        folder = Path(directory)
        (folder / "turn").write_text("nobody")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with open(folder / "bare.log", "wb") as log:
            bare = subprocess.Popen(
                [*command, __file__, "rank", directory, str(width)], env=env, stdout=log, stderr=log
            )
        handle = Launcher(RANKS, store=folder / "store").submit(train, directory, "rankzero", width, True)
        take_turns(folder, ["bare", "rankzero"], 2)  # Both warm up.
        for name in ("bare", "rankzero"):
            (folder / f"{name}-turns").unlink()
        driver = psutil.Process(handle.status().driver_pid)
        supervisors = [
            driver,
            *(p for p in driver.children(recursive=True) if "agent.supervise" in " ".join(p.cmdline())),
        ]
        before, began = cpu_of(supervisors), time.perf_counter()
        take_turns(folder, ["bare", "rankzero"], PAIRS)
        share = (cpu_of(supervisors) - before) / (time.perf_counter() - began) * 2
        (folder / "end").touch()
        handle.result(60)
        assert bare.wait(60) == 0, (folder / "bare.log").read_text()
        rates = {
            name: [float(x) for x in (folder / f"{name}-turns").read_text().split()] for name in ("bare", "rankzero")
        }
    report.add(f"{size} steps, torchrun", rates["bare"], "steps/s")
    report.add(f"{size} steps, rankzero", rates["rankzero"], "steps/s")
    ratios = [ours / theirs for ours, theirs in zip(rates["rankzero"], rates["bare"], strict=True)]
    report.add(f"{size} steps, ratio of each pair", ratios, "x")
    report.hold(f"{size} steps, rankzero / torchrun", statistics.median(ratios), 0.99, at_least=True)
    report.hold(f"{size} steps, agent and driver, share of a core in its turns", share, 0.02)


def take_turns(folder: Path, names: list[str], pairs: int) -> None:
    """Both in turn, the order changing from pair to pair."""
    for pair in range(pairs):
        for name in names if pair % 2 else reversed(names):
            seen = len(turns(folder, name))
            (folder / "turn.next").write_text(name)
            (folder / "turn.next").replace(folder / "turn")
            time.sleep(TURN)
            (folder / "turn.next").write_text("nobody")
            (folder / "turn.next").replace(folder / "turn")
            deadline = time.monotonic() + 60
            while len(turns(folder, name)) == seen:
                assert time.monotonic() < deadline, f"{name} does not take its turn"
                if pair == 0:
                    # It may still be starting: its first turn is when it is there.
                    (folder / "turn").write_text(name)
                time.sleep(0.02)
                if pair == 0:
                    (folder / "turn").write_text("nobody")
                    time.sleep(0.1)


def turns(folder: Path, name: str) -> list[float]:
    """Steps per second of each turn that a training has had."""
    try:
        return [float(rate) for rate in (folder / f"{name}-turns").read_text().split()]
    except FileNotFoundError:
        return []


def main() -> None:
    report = Report("steps", "Training throughput under supervision")
    for size, width in SIZES.items():
        measure(report, size, width)
    report.finish()


def rank(arguments: list[str]) -> Any:
    train(arguments[0], "bare", int(arguments[1]), False)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(sys.argv[2:])
    else:
        main()
