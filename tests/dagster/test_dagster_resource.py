"""`TorchDistributorResource.run`: what comes back, whatever the context and the IO manager."""

import sys
import threading
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import torch
from tests.dagster.dagster_events import failure_of, metadata_of
from tests.runs import folder_of

import rankzero.train as rt
from dagster_rankzero import TorchDistributorResource


def train(scale: float = 1.0) -> dict[str, torch.Tensor]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.full((2, 3), scale * (dist.get_rank() + 1))
    dist.all_reduce(total)
    rt.report({"loss": 0.25, "epoch": 3, "bad": float("nan")})
    print(f"rank {dist.get_rank()} says hello")
    return {"weight": total}


@dg.asset
def model(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource):
    return torch_distributor.run(context, train, scale=2.0)


def test_a_driver_on_the_cluster_needs_a_cluster(torch_distributor: TorchDistributorResource) -> None:
    there = torch_distributor.options(engine="spark", master="local[2]", deploy_mode="cluster")
    result = dg.materialize([model], resources={"torch_distributor": there}, raise_on_error=False)
    assert "is no cluster that could run a driver" in failure_of(result, "model")[0]


def test_an_asset_shows_the_run_and_its_result(
    torch_distributor: TorchDistributorResource, capfd: pytest.CaptureFixture[str]
) -> None:
    result = dg.materialize([model], resources={"torch_distributor": torch_distributor})
    shown = metadata_of(result, "model")
    assert shown["world_size"] == 2
    assert shown["metric/loss"] == 0.25
    assert shown["metric/epoch"] == 3
    assert shown["metric/bad"] == "nan"
    assert shown["format"] == "torch"
    # No milliseconds, and no time of day.
    assert 0 < shown["duration_seconds"] < 300
    assert shown["run_id"] == Path(shown["run_directory"]).name
    stored = folder_of(shown["run_directory"]) / "result"
    assert [file.stat().st_size for file in stored.iterdir()] == [shown["size"]]
    lines = capfd.readouterr().out.splitlines()
    assert "[0] rank 0 says hello" in lines
    assert "[1] rank 1 says hello" in lines


def test_configuration_reaches_the_ranks_without_dagster(
    torch_distributor: TorchDistributorResource, asset_context: dg.AssetExecutionContext
) -> None:
    class Optimizer(dg.Config):
        lr: float = 0.5

    class Config(dg.Config):
        optimizer: Optimizer = Optimizer()
        layers: list[int] = [1, 2]
        tags: dict[str, str] = {"a": "b"}

    def read(config: Config, nested: dict[str, list[Config]]) -> list[object]:
        return [
            config.optimizer.lr,
            config.layers,
            config.tags,
            nested["configs"][0].layers,
            sorted(name for name in sys.modules if name.partition(".")[0].startswith("dagster")),
        ]

    returned = torch_distributor.run(asset_context, read, Config(), nested={"configs": [Config(layers=[])]})
    assert returned.value == [0.5, [1, 2], {"a": "b"}, [], []]


@pytest.mark.parametrize(
    ("options", "arguments", "named"),
    [
        ({"num_processes": 0}, {}, "num_processes is 0"),
        ({"processes_per_task": 3}, {}, "processes_per_task=3"),
        ({"backend": "mpi"}, {}, "'mpi'"),
        ({"engine": "spark", "master": "localhost:7077"}, {}, "localhost:7077"),
        ({}, {"sclae": 1.0}, "sclae"),
        ({}, {"scale": threading.Lock()}, "scale"),
        ({"num_procs": 2}, {}, "num_procs"),
        ({"num_processes": "two"}, {}, "num_processes"),
    ],
)
def test_bad_input_fails_at_once_and_is_not_retried(
    torch_distributor: TorchDistributorResource,
    options: dict[str, object],
    arguments: dict[str, object],
    named: str,
    tmp_path: Path,
    asset_context: dg.AssetExecutionContext,
) -> None:
    with pytest.raises(dg.Failure) as caught:
        torch_distributor.options(**options).run(asset_context, train, **arguments)
    assert named in caught.value.description
    assert caught.value.allow_retries is False
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def test_trackers_of_a_resource_and_of_one_step(tmp_path: Path) -> None:
    from rankzero.tracking import Tracker

    class Ends(Tracker):
        def __init__(self, path: Path) -> None:
            self.path = path

        def end(self, run: Any, status: Any) -> None:
            self.path.write_text(f"{run.job.labels['step']} {status.state}")

    @dg.asset
    def first(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource) -> Any:
        return torch_distributor.run(context, float, 0.5)

    @dg.asset
    def second(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource) -> Any:
        return torch_distributor.options(trackers=[Ends(tmp_path / "second")]).run(context, float, 0.5)

    trackers = [Ends(tmp_path / "first")]
    resource = TorchDistributorResource(engine="local", store=str(tmp_path / "runs"), trackers=trackers)
    assert dg.materialize([first, second], resources={"torch_distributor": resource}).success
    assert [(tmp_path / name).read_text() for name in ("first", "second")] == ["first succeeded", "second succeeded"]
