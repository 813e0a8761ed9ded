"""`torch_multi_asset`: one training whose values become several assets."""

from pathlib import Path
from typing import NamedTuple

import dagster as dg
import pytest
import torch
from tests.dagster.dagster_events import failure_of, metadata_of, retries_of

import rankzero.train as rt
from dagster_rankzero import torch_multi_asset

OUTS = {"model": dg.AssetOut(), "metrics": dg.AssetOut(), "predictions": dg.AssetOut()}


@torch_multi_asset(outs=OUTS, num_processes=2)
def training() -> dict[str, object]:
    import torch

    rt.report({"loss": 0.5})
    size = rt.get_context().world_size
    return {"model": {"w": torch.ones(size)}, "metrics": {"loss": 0.5}, "predictions": torch.zeros(3)}


def version_of(instance: dg.DagsterInstance, key: str) -> str:
    return instance.get_latest_materialization_event(dg.AssetKey(key)).asset_materialization.tags[
        "dagster/data_version"
    ]


def test_every_value_goes_to_its_own_io_manager_with_its_own_version(
    resources: dict[str, object], instance: dg.DagsterInstance, assets_path: Path
) -> None:
    @dg.asset
    def report(model: dict[str, torch.Tensor], metrics: dict[str, float], predictions: torch.Tensor) -> float:
        return model["w"].sum().item() + metrics["loss"] + len(predictions)

    result = dg.materialize([training, report], resources=resources, instance=instance)
    assert result.output_for_node("report") == 5.5
    assert (metadata_of(result, "model")["format"], metadata_of(result, "metrics")["format"]) == ("torch", "json")
    for key in ("model", "metrics", "predictions"):
        shown = metadata_of(result, key)
        assert (shown["world_size"], shown["metric/loss"]) == (2, 0.5)
        assert version_of(instance, key) == shown["sha256"]


def test_other_io_managers_and_a_named_tuple_whose_names_count(
    resources: dict[str, object], instance: dg.DagsterInstance
) -> None:
    outs = {"model": dg.AssetOut(key=["ml", "model"], io_manager_key="memory"), "metrics": dg.AssetOut()}

    class Trained(NamedTuple):
        metrics: dict[str, int]
        model: list[int]

    @torch_multi_asset(outs=outs)
    def training() -> Trained:
        return Trained({"loss": 2}, [1])

    given = {**resources, "memory": dg.mem_io_manager}
    result = dg.materialize([training], resources=given, instance=instance)
    assert result.output_for_node("training", "model") == [1]
    assert result.output_for_node("training", "metrics") == {"loss": 2}
    event = instance.get_latest_materialization_event(dg.AssetKey(["ml", "model"]))
    assert len(event.asset_materialization.tags["dagster/data_version"]) == 64


def test_part_of_it_can_be_selected(resources: dict[str, object], assets_path: Path) -> None:
    subsettable = torch_multi_asset(outs=OUTS, can_subset=True)(three_numbers)
    result = dg.materialize([subsettable], selection=["metrics"], resources=resources)
    assert {event.asset_key.to_user_string() for event in result.get_asset_materialization_events()} == {"metrics"}
    assert not (assets_path / "model").exists()


def three_numbers() -> tuple[int, int, int]:
    return 1, 2, 3


def test_an_optional_output_may_be_left_out(resources: dict[str, object]) -> None:
    @torch_multi_asset(outs={"metrics": dg.AssetOut(), "champion": dg.AssetOut(is_required=False)})
    def training() -> dict[str, int]:
        return {"metrics": 1}

    result = dg.materialize([training], resources=resources)
    assert [event.asset_key.to_user_string() for event in result.get_asset_materialization_events()] == ["metrics"]


@pytest.mark.parametrize("value", [{"model": 1}, {"model": 1, "metrics": 2, "more": 3}, (1,), None])
def test_a_value_of_other_outputs_is_refused_and_nothing_is_stored(
    value: object, resources: dict[str, object], assets_path: Path
) -> None:
    @torch_multi_asset(
        outs={"model": dg.AssetOut(), "metrics": dg.AssetOut()}, retry_policy=dg.RetryPolicy(max_retries=1)
    )
    def training() -> object:
        return value

    result = dg.materialize([training], resources=resources, raise_on_error=False)
    assert "model, metrics" in failure_of(result, "training")[0]
    assert retries_of(result, "training") == 0
    assert not assets_path.exists()


def test_partitions_inputs_and_checks_pass_through(resources: dict[str, object], instance: dg.DagsterInstance) -> None:
    letters = dg.StaticPartitionsDefinition(["a", "b"])

    @dg.asset(partitions_def=letters)
    def features(context: dg.AssetExecutionContext) -> str:
        return context.partition_key * 2

    @torch_multi_asset(
        outs={"model": dg.AssetOut(), "metrics": dg.AssetOut()},
        partitions_def=letters,
        check_specs=[dg.AssetCheckSpec("finite", asset="model"), dg.AssetCheckSpec("told", asset="metrics")],
    )
    def training(features: str, partition_key: str) -> tuple[str, str]:
        rt.report({"check/finite": True})
        return features, partition_key

    result = dg.materialize([features, training], resources=resources, instance=instance, partition_key="b")
    assert result.output_for_node("training", "model") == "bb"
    assert result.output_for_node("training", "metrics") == "b"
    evaluations = {(e.asset_key.to_user_string(), e.check_name): e.passed for e in result.get_asset_check_evaluations()}
    assert evaluations == {("model", "finite"): True, ("metrics", "told"): False}


def test_a_backfill_in_a_single_run_stores_every_partition_of_every_output(
    resources: dict[str, object], instance: dg.DagsterInstance
) -> None:
    @torch_multi_asset(
        outs={"model": dg.AssetOut(), "metrics": dg.AssetOut()},
        partitions_def=dg.StaticPartitionsDefinition(["a", "b", "c"]),
        backfill_policy=dg.BackfillPolicy.single_run(),
    )
    def training(partition_keys: list[str]) -> dict[str, dict[str, str]]:
        return {name: {key: f"{name} of {key}" for key in partition_keys} for name in ("model", "metrics")}

    both = {"dagster/asset_partition_range_start": "a", "dagster/asset_partition_range_end": "b"}
    dg.materialize([training], resources=resources, instance=instance, tags=both)
    dg.materialize([training], resources=resources, instance=instance, partition_key="c")
    defs = dg.Definitions([training], resources=resources)
    for name in ("model", "metrics"):
        stored = [defs.load_asset_value(name, partition_key=key, instance=instance) for key in "abc"]
        assert stored == [f"{name} of {key}" for key in "abc"]
