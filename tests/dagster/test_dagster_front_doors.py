"""Trainings of other launchers, as assets."""

from pathlib import Path
from typing import Any

import dagster as dg

from dagster_rankzero import TorchDistributorResource


def ray_loop(config: dict[str, Any]) -> float:
    from rankzero.compat.ray_train import train

    return config["lr"] * train.get_context().get_world_size()


def test_a_trainer_of_ray(tmp_path: Path) -> None:
    from rankzero.compat.ray_train import ScalingConfig, TorchTrainer

    @dg.asset
    def ray(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource) -> Any:
        trainer = TorchTrainer(ray_loop, train_loop_config={"lr": 0.5}, scaling_config=ScalingConfig(num_workers=2))
        return torch_distributor.run(context, trainer)

    resource = TorchDistributorResource(engine="local", num_processes=2, store=str(tmp_path))
    done = dg.materialize([ray], resources={"torch_distributor": resource})
    assert done.output_for_node("ray") == 1.0


def test_trackers_of_a_resource_and_of_one_step(tmp_path: Path) -> None:
    from rankzero.tracking import Tracker

    class Ends(Tracker):
        def __init__(self, path: Path) -> None:
            self.path = path

        def end(self, run: Any, status: Any) -> None:
            self.path.write_text(f"{run.labels['step']} {status.state}")

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
