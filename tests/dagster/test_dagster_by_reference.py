"""A result that `RankZeroIOManager` stores is never loaded by its step; any other IO manager gets the value."""

import os
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest

from dagster_rankzero import TorchDistributorResource, torch_asset, torch_distributor_op
from rankzero import ResultRef

Context = dg.AssetExecutionContext


class Unloadable:
    """A value that only a rank can load."""

    def __reduce__(self) -> tuple[object, ...]:
        return loaded, ()


def loaded() -> Unloadable:
    if "RANK" not in os.environ:
        raise ValueError("never a number")
    return Unloadable()


def train() -> Unloadable:
    return Unloadable()


def asset_of_a_function(**options: object) -> dg.AssetsDefinition:
    return torch_asset(name="trained", options=options)(train)


def asset_of_ones_own(**options: object) -> dg.AssetsDefinition:
    @dg.asset
    def trained(context: Context, torch_distributor: TorchDistributorResource):
        return torch_distributor.options(**options).run(context, train)

    return trained


def asset_of_mapped_ops(**options: object) -> dg.AssetsDefinition:
    @dg.op(out=dg.DynamicOut())
    def settings():
        yield dg.DynamicOutput(1, mapping_key="one")

    @torch_distributor_op(options=options)
    def train_one(setting):
        return Unloadable()

    @dg.op
    def best(trained: list[ResultRef]):
        return trained[0]

    @dg.graph_asset
    def trained():
        return best(settings().map(train_one).collect())

    return trained


@dg.asset
def format_of(trained: ResultRef) -> str:
    return trained.format


ASSETS = [asset_of_a_function, asset_of_ones_own, asset_of_mapped_ops]


def failed(result: dg.ExecuteInProcessResult) -> str:
    (event,) = result.get_step_failure_events()
    return event.step_failure_data.error.to_string()


@pytest.mark.parametrize("make", ASSETS)
def test_the_step_never_loads_what_our_io_manager_stores(
    make: Callable[..., dg.AssetsDefinition], resources: dict[str, object]
) -> None:
    result = dg.materialize([make(), format_of], resources=resources)
    assert result.output_for_node("format_of") == "pickle"


@pytest.mark.parametrize("make", ASSETS)
@pytest.mark.parametrize("wanted", ["on request", "by another IO manager"])
def test_the_value_is_loaded_if_it_is_wanted(
    make: Callable[..., dg.AssetsDefinition], wanted: str, resources: dict[str, object], tmp_path: Path
) -> None:
    others = {**resources, "io_manager": dg.FilesystemIOManager(base_dir=str(tmp_path / "others"))}
    assets, given = ([make(by_reference=False)], resources) if wanted == "on request" else ([make()], others)
    assert "never a number" in failed(dg.materialize(assets, resources=given, raise_on_error=False))


def test_an_output_whose_type_is_checked_gets_the_value(resources: dict[str, object]) -> None:
    @dg.asset
    def typed(context: Context, torch_distributor: TorchDistributorResource) -> dg.MaterializeResult[dict]:
        return torch_distributor.run(context, lambda: {"x": 1})

    assert dg.materialize([typed], resources=resources).output_for_node("typed") == {"x": 1}


def test_several_partitions_of_a_run_get_the_value(resources: dict[str, object], instance: dg.DagsterInstance) -> None:
    @dg.asset(partitions_def=dg.StaticPartitionsDefinition(["a", "b"]), backfill_policy=dg.BackfillPolicy.single_run())
    def letters(context: Context, torch_distributor: TorchDistributorResource):
        return torch_distributor.run(context, lambda: {"a": 1, "b": 2})

    both = {"dagster/asset_partition_range_start": "a", "dagster/asset_partition_range_end": "b"}
    dg.materialize([letters], resources=resources, instance=instance, tags=both)
    defs = dg.Definitions([letters], resources=resources)
    assert defs.load_asset_value("letters", partition_key="b", instance=instance) == 2


def test_each_output_has_an_io_manager_of_its_own(resources: dict[str, object], tmp_path: Path) -> None:
    def small() -> dict[str, int]:
        return {"x": 1}

    @dg.asset
    def seen(here, there) -> list[int]:
        return [here["x"], there["x"]]

    assets = [
        torch_asset(name="here")(small),
        torch_asset(name="there", io_manager_key="other")(small),
        seen,
    ]
    given = {**resources, "other": dg.FilesystemIOManager(base_dir=str(tmp_path / "others"))}
    result = dg.materialize(assets, resources=given)
    assert isinstance(result.output_for_node("here"), ResultRef)
    assert result.output_for_node("there") == {"x": 1}
    assert result.output_for_node("seen") == [1, 1]
