"""`prepare_model` and `prepare_data_loader` beside the same training written by hand, with DDP and with FSDP2.

Accelerate is measured, too, where it is installed, and Ray Train in workers of its own: `ray_training.py`. The sides
take turns in the same two ranks.

    python benchmarks/training.py [launches]
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from measure import Report
from turns import Turns, ratios, take_turns

import rankzero.train as rt
from rankzero import Launcher

RANKS = 2
WIDTH = 512
ROWS = 64 * 16 * RANKS


def build() -> Any:
    """A model of a few layers."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(
        *[torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()) for _ in range(4)],
        torch.nn.Linear(WIDTH, 10),
    )


def loader(**options: Any) -> Any:
    """Batches of 64 rows."""
    import torch

    data = torch.utils.data.TensorDataset(torch.randn(ROWS, WIDTH), torch.randint(0, 10, (ROWS,)))
    return torch.utils.data.DataLoader(data, batch_size=64, **options)


def epoch_of(
    model: Any, batches: Iterable[Any], optimizer: Any, backward: Callable[[Any], object] | None = None
) -> Callable[[], None]:
    """An epoch of a training."""
    import torch

    def epoch() -> None:
        for x, y in batches:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            if backward is None:
                loss.backward()
            else:
                backward(loss)
            optimizer.step()

    return epoch


def by_hand(model: Any) -> Callable[[], None]:
    """With torch alone."""
    import torch
    from torch.utils.data.distributed import DistributedSampler

    batches = loader()
    sampler: Any = DistributedSampler(batches.dataset)
    batches = torch.utils.data.DataLoader(batches.dataset, batch_size=64, sampler=sampler)
    train = epoch_of(model, batches, torch.optim.SGD(model.parameters(), lr=0.01))
    epochs = 0

    def epoch() -> None:
        nonlocal epochs
        sampler.set_epoch(epochs)
        epochs += 1
        train()

    return epoch


def prepared(strategy: str) -> Callable[[], None]:
    """With what `rankzero.train` has."""
    import torch

    options = {"units": [torch.nn.Sequential]} if strategy == "fsdp" else {}
    model = rt.prepare_model(build(), strategy, **options)
    batches = rt.prepare_data_loader(loader(shuffle=True))
    return epoch_of(model, batches, torch.optim.SGD(model.parameters(), lr=0.01))


def accelerated() -> Callable[[], None]:
    """With Accelerate."""
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(shuffle=True))
    return epoch_of(model, batches, optimizer, accelerator.backward)


def ddp(with_accelerate: bool) -> Turns:
    """Seconds of an epoch."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    rt.ensure_process_group()
    sides = {
        "by hand": by_hand(DistributedDataParallel(build())),
        "by hand, again": by_hand(DistributedDataParallel(build())),
        "rankzero.train": prepared("ddp"),
    }
    if with_accelerate:
        sides["Accelerate"] = accelerated()
    return take_turns(sides, turns=12, steps=1)


def fsdp() -> Turns:
    """Seconds of an epoch."""
    import torch
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    rt.ensure_process_group()

    def sharded() -> Any:
        model = build()
        for layer in model:
            if isinstance(layer, torch.nn.Sequential):
                fully_shard(layer)
        return fully_shard(model)

    sides = {
        "by hand": by_hand(sharded()),
        "by hand, again": by_hand(sharded()),
        "rankzero.train": prepared("fsdp"),
    }
    return take_turns(sides, turns=12, steps=1)


def in_ray() -> Turns:
    """Seconds of an epoch in Ray Train's workers; none where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        print("Ray Train is left out: ray is not installed")
        return {}
    command = [sys.executable, str(Path(__file__).parent / "ray_training.py")]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    taken: Turns = json.loads(done.stdout.splitlines()[-1])
    return taken


def main(launches: int) -> None:
    report = Report("training", f"Epochs of a small model, {RANKS} ranks")
    found: dict[str, Turns] = defaultdict(lambda: defaultdict(list))
    with_accelerate = importlib.util.find_spec("accelerate") is not None
    with tempfile.TemporaryDirectory(prefix="rankzero-bench-") as store:
        launcher = Launcher(RANKS, store=store)
        for _ in range(launches):
            for what, taken in (
                ("DDP", launcher.run(ddp, with_accelerate)),
                ("FSDP2", launcher.run(fsdp)),
                ("DDP in Ray's workers", in_ray()),
            ):
                for side, seconds in taken.items():
                    found[what][side] += seconds
    for what, sides in found.items():
        for side, seconds in sides.items():
            report.add(f"{what}, {side}", [ROWS / value for value in seconds], "rows/s")
        for side in list(sides)[1:]:
            speed = ratios(sides, "by hand", side)
            report.add(f"{what}, rows/s of {side} / by hand", speed, "x")
            if side == "rankzero.train":
                report.hold(f"{what}, rows/s of {side} / by hand", statistics.median(speed), 0.99, at_least=True)
    report.finish()


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 5)
