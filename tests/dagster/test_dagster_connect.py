"""Steps whose resource names a Spark Connect server: the same assets, tries and results."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from tests.conftest import until
from tests.dagster import durable_training
from tests.dagster.dagster_events import value_of
from tests.engines.connect_server import ConnectServer

from dagster_rankzero import RankZeroIOManager, TorchDistributorResource, torch_asset, torch_distributor_op
from rankzero import RunHandle

WAIT = 120.0


@pytest.fixture
def on_connect(server: ConnectServer, tmp_path: Path, marker: str) -> TorchDistributorResource:
    """Two ranks on the server."""
    return TorchDistributorResource(
        connect=server.url, num_processes=2, store=str(tmp_path / "runs"), env={"MARK": marker}
    )


def train(scale: float) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.full((2, 3), scale * (dist.get_rank() + 1))
    dist.all_reduce(total)
    return {"weight": total}


def test_an_asset_trains_on_the_server(on_connect: TorchDistributorResource, tmp_path: Path) -> None:
    @dg.asset
    def model(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource):
        return torch_distributor.run(context, train, scale=2.0)

    resources = {"torch_distributor": on_connect, "io_manager": RankZeroIOManager(base_path=str(tmp_path / "assets"))}
    assert value_of(dg.materialize([model], resources=resources), "model")["weight"].sum().item() == 2 * 3 * (2.0 + 4.0)


@pytest.mark.soak
def test_an_asset_that_calls_the_resource_one_of_ranks_and_an_op(
    on_connect: TorchDistributorResource, tmp_path: Path
) -> None:
    @dg.asset
    def model(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource):
        return torch_distributor.run(context, train, scale=2.0)

    @torch_asset
    def total(model: dict) -> float:
        return model["weight"].sum().item()

    resources = {"torch_distributor": on_connect, "io_manager": RankZeroIOManager(base_path=str(tmp_path / "assets"))}
    result = dg.materialize([model, total], resources=resources)
    assert value_of(result, "total") == 2 * 3 * (2.0 + 4.0)

    @dg.job(resource_defs=resources)
    def pipeline() -> None:
        torch_distributor_op(train)()

    run_config = {"ops": {"train": {"inputs": {"scale": 1.0}}}}
    trained = value_of(pipeline.execute_in_process(run_config=run_config), "train")
    assert trained["weight"].sum().item() == 2 * 3 * (1.0 + 2.0)


@pytest.mark.soak
def test_who_interrupts_a_step_ends_its_ranks(
    on_connect: TorchDistributorResource, tmp_path: Path, marker: str
) -> None:
    def interrupt() -> None:
        until(lambda: list(tmp_path.glob("runs/*/checkpoints/*")), WAIT, "a checkpoint")
        os.kill(os.getpid(), signal.SIGUSR1)

    def stop(*_: Any) -> None:
        raise dg.DagsterExecutionInterruptedError

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with dg.build_asset_context() as context, pytest.raises(dg.DagsterExecutionInterruptedError):
            on_connect.run(context, durable_training.train, str(tmp_path))
    finally:
        signal.signal(signal.SIGUSR1, before)
    (job,) = tmp_path.glob("runs/*/job.json")
    assert RunHandle.attach(job.parent).status().state == "cancelled"
