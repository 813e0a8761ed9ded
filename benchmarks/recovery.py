"""From a rank's SIGKILL to the first optimizer step of every rank after the restart, from the last checkpoint.

Run: ``python benchmarks/recovery.py [runs]``; RECOVERY_SIZES="1" and RECOVERY_RANKS="2" name fewer models and worlds.
Beside rankzero, on LocalEngine and on an embedded Spark, torchrun with ``--max-restarts`` and Ray Train with
``max_failures``, where Ray is installed. Each run is a training of its own in processes of its own, as a training is
that runs for hours. The ranks reduce the loss and not the gradients, which would take as long everywhere.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from measure import Report

from rankzero import Launcher, LocalEngine, SparkEngine

RUNS = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 2
WORLDS = [int(ranks) for ranks in os.environ.get("RECOVERY_RANKS", "2 4").split()]
SIZES = [int(size) for size in os.environ.get("RECOVERY_SIZES", "1 500").split()]
"""Megabytes of the model."""

SIDES = ["LocalEngine", "Spark", "torchrun", *(["Ray Train"] if importlib.util.find_spec("ray") else [])]
SETTLED = {"LocalEngine": 9.0, "Spark": 9.0}
"""Seconds for which a training runs after its checkpoint before a rank is killed: a zygote loads the rest of
torch five seconds after the ranks have started. Elsewhere one second is as good as an hour."""

LOOK = 0.005
WAIT = 45.0
READY, AGAIN = "ready", "again"
"""Names of the notes of a rank: it has a checkpoint and trains; it has taken its first step after the restart."""


def train(
    folder: str, megabytes: int, checkpoint: dict[str, Any] | None, save: Callable[[dict[str, Any] | None], None]
) -> None:
    """Trains until it is killed; with a checkpoint it takes one step. Rank 0 has a state to save, others have None."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    # A row of 1024 numbers has 4 KiB. Random numbers would take longer than a restart.
    model = torch.nn.utils.skip_init(torch.nn.Linear, 1024, megabytes * 256, bias=False)
    if checkpoint:
        model.load_state_dict(checkpoint)
    else:
        torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 1024)).square().mean()
        loss.backward()
        dist.all_reduce(loss.detach())
        optimizer.step()

    def note(name: str) -> None:
        unfinished = Path(folder, f".{name}-{dist.get_rank()}")
        unfinished.write_text(f"{os.getpid()} {time.monotonic()}")
        unfinished.rename(Path(folder, unfinished.name[1:]))

    step()
    if checkpoint:
        note(AGAIN)
        dist.barrier()
        return
    save(model.state_dict() if dist.get_rank() == 0 else None)
    dist.barrier()
    note(READY)
    while True:
        step()


def with_rankzero(folder: str, megabytes: int) -> None:
    """The training under rankzero."""
    import rankzero.train as rt

    def save(state: dict[str, Any] | None) -> None:
        rt.report({"step": 1}, checkpoint=state)
        while state and rt.get_checkpoint() is None:
            time.sleep(LOOK)

    found = rt.get_checkpoint()
    train(folder, megabytes, found.load() if found else None, save)


def with_torchrun(folder: str, megabytes: int) -> None:
    """The training under torchrun, with checkpoints as its tutorial has them."""
    import torch

    path = Path(folder, "checkpoint.pt")

    def save(state: dict[str, Any] | None) -> None:
        if state:
            torch.save(state, path)

    train(folder, megabytes, torch.load(path, mmap=True) if path.exists() else None, save)


def with_ray(config: dict[str, Any]) -> None:
    """The training in workers of Ray Train."""
    import torch
    from ray import train as ray_train

    def save(state: dict[str, Any] | None) -> None:
        with tempfile.TemporaryDirectory() as directory:
            torch.save(state, Path(directory, "checkpoint.pt"))
            ray_train.report({"step": 1}, ray_train.Checkpoint.from_directory(directory) if state else None)

    state = None
    if found := ray_train.get_checkpoint():
        with found.as_directory() as directory:
            state = torch.load(Path(directory, "checkpoint.pt"))
    train(config["folder"], config["megabytes"], state, save)


def ray_program(folder: str, megabytes: int, ranks: int) -> None:
    """Starts Ray and trains there. A program of its own, as in `launch.py`."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(num_cpus=2 * ranks, include_dashboard=False, log_to_driver=False)
    TorchTrainer(
        with_ray,
        train_loop_config={"folder": folder, "megabytes": megabytes},
        scaling_config=ScalingConfig(num_workers=ranks),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=str(Path(folder, "ray")), failure_config=FailureConfig(max_failures=1)),
    ).fit()
    ray.shutdown()


@contextmanager
def program(command: list[str], folder: str) -> Iterator[None]:
    """A training that another launcher starts; the end of the block waits for its success."""
    with open(Path(folder, "log"), "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            yield
            assert process.wait(WAIT) == 0, Path(folder, "log").read_text()[-12000:]
        finally:
            # Ranks have sessions of their own, and outlive a launcher that is killed.
            with contextlib.suppress(psutil.NoSuchProcess):
                for each in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
            process.kill()
            process.wait()


@contextmanager
def run_of(engine: Any, ranks: int, folder: str, megabytes: int) -> Iterator[None]:
    """A training of rankzero in a driver process of its own; the end of the block waits for its success."""
    launcher = Launcher(ranks, engine=engine, store=Path(folder, "store"), max_restarts=1, env={"OMP_NUM_THREADS": "1"})
    handle = launcher.submit(with_rankzero, folder, megabytes)
    try:
        yield
        handle.result(WAIT)
    finally:
        handle.cancel()
        handle.wait(WAIT)


def training(side: str, ranks: int, folder: str, megabytes: int) -> Any:
    """Starts the training of one side."""
    if side == "LocalEngine":
        return run_of(LocalEngine(), ranks, folder, megabytes)
    if side == "Spark":
        return run_of(SparkEngine(master=f"local[{ranks}]"), ranks, folder, megabytes)
    own = [__file__, side, folder, str(megabytes), str(ranks)]
    if side == "torchrun":
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=1"]
        return program([sys.executable, *launcher, *own], folder)
    return program([sys.executable, *own], folder)


class NoRestartError(Exception):
    """The ranks did not train again within `WAIT`."""


def await_notes(folder: str, name: str, ranks: int) -> list[tuple[int, float]]:
    """Returns process ids and times of the notes of all ranks."""
    deadline = time.monotonic() + WAIT
    paths = [Path(folder, f"{name}-{rank}") for rank in range(ranks)]
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline:
            raise NoRestartError(f"no notes {name!r} after {WAIT:g} s")
        time.sleep(LOOK)
    return [(int(pid), float(when)) for pid, when in (path.read_text().split() for path in paths)]


def recover(side: str, ranks: int, megabytes: int) -> float:
    """Seconds from the signal to the step of the last rank."""
    with tempfile.TemporaryDirectory(prefix="rankzero-bench-") as folder:
        with training(side, ranks, folder, megabytes):
            victim = await_notes(folder, READY, ranks)[-1][0]
            time.sleep(SETTLED.get(side, 1.0))
            killed = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            steps = await_notes(folder, AGAIN, ranks)
        return max(when for _, when in steps) - killed


def measure(report: Report, megabytes: int, ranks: int) -> None:
    """One size of the model and of the world: all sides in turn."""
    case = f"{megabytes} MB, {ranks} ranks"
    taken: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(RUNS):
        for side, seconds in taken.items():
            try:
                seconds.append(recover(side, ranks, megabytes))
            except NoRestartError as error:
                print(f"  {case}, {side}: {error}", flush=True)
    medians = {side: report.add(f"{case}, {side}", seconds) for side, seconds in taken.items() if seconds}
    for side, seconds in taken.items():
        # torchrun's ranks sometimes hang in the collectives of their second attempt.
        report.add(f"{case}, {side}, restarts of {RUNS} that trained within {WAIT:g} s", [len(seconds)], "")
    for side in ("LocalEngine", "Spark"):
        if megabytes == min(SIZES):
            report.hold(f"{case}, {side}, s", medians[side], 1.0)
        if "torchrun" in medians:
            report.hold(f"{case}, {side} / torchrun", medians[side] / medians["torchrun"], 0.2)


def main() -> None:
    report = Report("recovery", "A rank is killed: seconds to the first step after the restart")
    for megabytes in SIZES:
        for ranks in WORLDS:
            measure(report, megabytes, ranks)
    report.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["torchrun"]:
        with_torchrun(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1:2] == ["Ray Train"]:
        ray_program(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
