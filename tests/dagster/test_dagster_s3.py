"""`RankZeroIOManager` and run directories on S3: a real server that speaks its protocol."""

from pathlib import Path
from urllib.parse import urlsplit

import dagster as dg
import pytest
import torch
from tests.dagster.dagster_events import metadata_of
from tests.s3 import S3Server

from dagster_rankzero import RankZeroIOManager, TorchDistributorResource, torch_asset
from rankzero import ResultRef, store
from rankzero.run.directory import RunDirectory


@pytest.fixture
def on_s3(bucket: str, torch_distributor: TorchDistributorResource) -> dict[str, object]:
    """Everything on S3: run directories and assets, in one bucket."""
    return {
        "torch_distributor": torch_distributor.options(num_processes=1, store=f"{bucket}/runs", by_reference=True),
        "io_manager": RankZeroIOManager(base_path=f"{bucket}/assets"),
    }


@torch_asset
def model() -> dict[str, torch.Tensor]:
    import torch

    return {"w": torch.arange(100_000)}


def test_a_result_moves_inside_the_bucket_and_the_ranks_open_it(
    on_s3: dict[str, object], bucket: str, s3_server: S3Server, instance: dg.DagsterInstance
) -> None:
    @torch_asset
    def doubled(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"w": model["w"] * 2}

    @dg.asset
    def total(doubled: dict[str, torch.Tensor]) -> int:
        return doubled["w"].sum().item()

    result = dg.materialize([model, doubled, total], resources=on_s3, instance=instance)
    assert result.output_for_node("total") == sum(range(100_000)) * 2
    shown = metadata_of(result, "model")
    run = urlsplit(str(shown["run_directory"])).path
    own = RunDirectory(str(shown["run_directory"])).current()
    assert len(store.list_names(own.path("result"))) == 1
    assert [line for line in s3_server.requests("GET", f"{run}/submissions/") if "/result/value" in line] == []
    assert any("/status.json" in line for line in s3_server.requests("GET", f"{run}/submissions/"))
    assert shown["path"] == f"{bucket}/assets/model"
    (data,) = (name for name in store.list_names(f"{bucket}/assets/model") if name.startswith("data-"))
    assert shown["size"] == store.size(f"{bucket}/assets/model/{data}")
    events = instance.fetch_materializations(dg.AssetKey("model"), limit=1).records
    assert events[0].asset_materialization.tags["dagster/data_version"] == shown["sha256"]


def test_a_handle_of_a_disk_is_carried_to_the_bucket(bucket: str, tmp_path: Path, instance: dg.DagsterInstance) -> None:
    ref = ResultRef.save({"w": torch.ones(4)}, tmp_path / "elsewhere")

    @dg.asset
    def stored() -> ResultRef:
        return ref

    defs = dg.Definitions([stored], resources={"io_manager": RankZeroIOManager(base_path=f"{bucket}/assets")})
    assert dg.materialize([stored], resources=defs.resources, instance=instance).success
    assert torch.equal(defs.load_asset_value("stored", python_type=object, instance=instance)["w"], torch.ones(4))
