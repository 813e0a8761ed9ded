"""`torch_asset`: an asset like any other, whose body runs on every rank."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.dagster.dagster_events import metadata_of, value_of
from tests.runs import job_file

import rankzero.train as rt
from dagster_rankzero import RankZeroIOManager, TorchDistributorResource, torch_asset

if TYPE_CHECKING:
    from collections import OrderedDict


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


@dg.asset
def features() -> dict[str, torch.Tensor]:
    return {"x": torch.arange(6.0)}


def test_inputs_come_from_io_managers_and_the_value_goes_to_one(resources: dict[str, object]) -> None:
    @torch_asset(num_processes=2)
    def model(features: dict[str, torch.Tensor], *, scale: int) -> dict[str, torch.Tensor]:
        return {"w": features["x"] * scale * rt.get_context().world_size}

    @dg.asset
    def scale() -> int:
        return 3

    @dg.asset
    def total(model: dict[str, torch.Tensor]) -> float:
        return model["w"].sum().item()

    result = dg.materialize([features, scale, model, total], resources=resources)
    assert value_of(result, "total") == 15.0 * 3 * 2
    assert metadata_of(result, "model")["world_size"] == 2


def test_an_input_of_the_rankzero_io_manager_is_opened_by_the_ranks_and_not_by_the_step(
    resources: dict[str, object], assets_path: Path
) -> None:
    @torch_asset
    def model(features: dict[str, torch.Tensor]) -> str:
        return type(features["x"]).__name__

    result = dg.materialize([features, model], resources=resources)
    assert value_of(result, "model") == "Tensor"
    job = json.loads(job_file(metadata_of(result, "model")["run_directory"]).read_text())
    (opened,) = [file["location"] for file in job["files"].values() if file["absolute"]]
    assert opened.startswith(str(assets_path / "features"))


def test_an_input_of_another_io_manager_keeps_its_type_and_travels_with_the_job(
    resources: dict[str, object], tmp_path: Path
) -> None:
    seen = []

    class Typed(dg.InMemoryIOManager):
        def load_input(self, context: dg.InputContext) -> object:
            seen.append(context.dagster_type.typing_type)
            return super().load_input(context)

    @dg.asset
    def point() -> Point:
        return Point(3)

    @torch_asset
    def model(point: Point) -> int:
        return point.x

    result = dg.materialize([point, model], resources={**resources, "io_manager": Typed()})
    assert value_of(result, "model") == 3
    assert seen == [Point]


def test_several_training_functions_may_take_the_same_types(resources: dict[str, object]) -> None:
    @torch_asset
    def small(features: dict[str, torch.Tensor]) -> int:
        return 1

    @torch_asset
    def large(features: dict[str, torch.Tensor]) -> int:
        return 2

    defs = dg.Definitions([features, small, large], jobs=[dg.define_asset_job("train")], resources=resources)
    snapshot = defs.resolve_job_def("train").get_job_snapshot()
    shown = {t.display_name for t in snapshot.dagster_type_namespace_snapshot.all_dagster_type_snaps_by_key.values()}
    assert "Dict[String,Tensor]" in shown
    assert defs.resolve_job_def("train").execute_in_process().success


def test_arguments_of_an_asset_pass_through(resources: dict[str, object]) -> None:
    @torch_asset(
        num_processes=2,
        key=["models", "digits"],
        ins={"data": dg.AssetIn(key="features")},
        deps=["calendar"],
        group_name="training",
        kinds={"pytorch"},
        tags={"team": "vision"},
        owners=["team:vision"],
        metadata={"paper": "none"},
        op_tags={"dagster/priority": "3"},
        pool="gpu",
        code_version="1",
        retry_policy=dg.RetryPolicy(max_retries=4),
        description="Digits.",
        required_resource_keys={"other"},
    )
    def model(data: dict[str, torch.Tensor]) -> int:
        """Not this."""
        return rt.get_context().world_size

    key = dg.AssetKey(["models", "digits"])
    spec = model.get_asset_spec(key)
    assert {dep.asset_key for dep in spec.deps} == {dg.AssetKey("features"), dg.AssetKey("calendar")}
    assert (spec.group_name, spec.kinds, spec.owners) == ("training", {"pytorch"}, ["team:vision"])
    assert (spec.tags["team"], spec.metadata["paper"], spec.code_version) == ("vision", "none", "1")
    assert spec.description == "Digits."
    assert (model.op.pool, model.op.retry_policy.max_retries) == ("gpu", 4)
    assert model.op.tags["dagster/priority"] == "3"
    result = dg.materialize([features, model], resources={**resources, "other": 1})
    assert value_of(result, "models__digits") == 2


def test_a_function_annotated_to_return_nothing_stores_nothing(resources: dict[str, object], assets_path: Path) -> None:
    @torch_asset
    def warm_up() -> None:
        print("warm")

    result = dg.materialize([warm_up], resources=resources)
    assert metadata_of(result, "warm_up")["world_size"] == 1
    assert not (assets_path / "warm_up").exists()


def test_annotations_that_only_a_type_checker_sees_are_fine(resources: dict[str, object]) -> None:
    @torch_asset
    def model(features: "OrderedDict[str, torch.Tensor]") -> "OrderedDict":
        return len(features)

    assert value_of(dg.materialize([features, model], resources=resources), "model") == 1


def with_context(context: dg.AssetExecutionContext) -> None: ...


def with_resource(cluster: TorchDistributorResource) -> None: ...


def with_star(*features: object) -> None: ...


async def asynchronous() -> None: ...


@pytest.mark.parametrize(
    ("train", "named"),
    [
        (with_context, "'context'"),
        (with_resource, "'cluster'"),
        (with_star, "features"),
        (asynchronous, "plain function"),
        (features, "plain function"),
        ("train.py", "plain function"),
    ],
)
def test_functions_that_cannot_run_on_ranks_are_refused_when_defined(train: object, named: str) -> None:
    with pytest.raises(dg.DagsterInvalidDefinitionError, match=named):
        torch_asset()(train)


def test_a_frame_that_is_an_input_is_a_dataset(
    torch_distributor: TorchDistributorResource, tmp_path: Path, session: Any
) -> None:
    pq.write_table(pa.table({"id": range(10)}), tmp_path / "t.parquet")

    @dg.asset
    def scans() -> Any:
        return session.range(7)

    @dg.asset
    def factor() -> int:
        return 3

    @torch_asset(options={"dataset": str(tmp_path / "t.parquet")})
    def model(scans: Any, factor: int) -> list[int]:
        return [rt.get_dataset_shard(scans).num_rows * factor, rt.get_dataset_shard("train").num_rows]

    resources = {"torch_distributor": torch_distributor, "io_manager": dg.mem_io_manager}
    result = dg.materialize([scans, factor, model], resources=resources)
    assert result.output_for_node("model") == [21, 10]
    resources["io_manager"] = RankZeroIOManager(base_path=str(tmp_path / "assets"))
    with pytest.raises(dg.Failure, match="stores no DataFrame of Spark: return the path of a table"):
        dg.materialize([scans], resources=resources)
