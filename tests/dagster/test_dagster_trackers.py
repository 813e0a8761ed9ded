"""Trackers of a resource and of one step."""

from pathlib import Path
from typing import Any

import dagster as dg

from dagster_rankzero import TorchDistributorResource


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
