"""What ranks run on executors that have torch alone: nothing of the suite is imported there."""

import importlib.util
import os
import sys
import time

# As `tests.loading` does, which is not imported there.
from importlib import import_module as load_module
from typing import Any

import rankzero.train as rt

NOT_THERE = ("rankzero", "cloudpickle", "fsspec", "pyarrow", "pandas", "psutil", "click", "airflow", "dagster")


def what_is_there() -> dict[str, Any]:
    import rankzero as own

    found = [name for name in NOT_THERE if importlib.util.find_spec(name)]
    return {"python": sys.executable, "found": found, "rankzero": own.__file__}


def from_the_environment(name: str) -> list[dict[str, Any]]:
    """Each rank's interpreter, directory, and the value of a module that only its environment has."""
    import torch
    import torch.distributed as dist

    import rankzero as own

    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    value = load_module(name).VALUE
    found = {"python": sys.executable, "value": value, "sum": total.item(), "rankzero": own.__file__}
    return list(rt.all_gather_object({**found, "directory": os.getcwd()}))


def train_digits(epochs: int) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    checkpoint = rt.get_checkpoint()
    model = rt.prepare_model(torch.nn.Linear(4, 2))
    rows = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))
    loader = rt.prepare_data_loader(torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        rt.report(
            {"loss": loss.item(), "epoch": epoch}, checkpoint={"model": rt.full_state_dict(model), "epoch": epoch}
        )
    seen = rt.all_gather_object(rt.get_context().rank)
    return {
        "ranks": seen,
        "model": rt.full_state_dict(model),
        "from": checkpoint.load()["epoch"] if checkpoint else None,
    }


def fail_once() -> int:
    rt.report({"step": 1}, checkpoint={"step": 1})
    deadline = time.monotonic() + 60
    while (checkpoint := rt.get_checkpoint()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if rt.get_context().attempt == 0:
        raise ConnectionError("the first attempt is to fail")
    return int(checkpoint.load()["step"])


def ray_loop(config: dict[str, Any]) -> None:
    import torch

    from rankzero.compat.ray_train import train

    model = train.torch.prepare_model(torch.nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    train.report({"world": train.get_context().get_world_size(), "lr": config["lr"]})


def hvd_loop() -> float:
    import torch

    import rankzero.compat.horovod.torch as hvd

    hvd.init()
    return float(hvd.allreduce(torch.tensor(float(hvd.rank() + 1)), op=hvd.Sum))
