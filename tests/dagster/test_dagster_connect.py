"""Steps whose resource names a Spark Connect server: the same assets, tries and results."""

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from tests.dagster.dagster_events import value_of
from tests.engines.connect_server import ConnectServer

from dagster_rankzero import RankZeroIOManager, TorchDistributorResource

WAIT = 120.0


@pytest.fixture
def on_connect(server: ConnectServer, tmp_path: Path, marker: str) -> TorchDistributorResource:
    """Two ranks on the server."""
    return TorchDistributorResource(
        master=server.url, num_processes=2, store=str(tmp_path / "runs"), env={"MARK": marker}
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
