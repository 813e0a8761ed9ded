"""Checks of a run of several partitions: each partition has an evaluation of its own, as in a run of it alone."""

import dagster as dg
import pytest

import rankzero.train as rt
from dagster_rankzero import build_champion_check, build_metric_bounds_checks, torch_asset, torch_multi_asset

DAYS = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-04")
SINGLE_RUN = dg.BackfillPolicy.single_run()
RANGE = {"dagster/asset_partition_range_start": "2026-01-01", "dagster/asset_partition_range_end": "2026-01-03"}


def history(instance: dg.DagsterInstance, asset: str, check: str) -> dict[str | None, str]:
    """The status of a check's latest execution by partition, as the UI shows it."""
    key = dg.AssetCheckKey(dg.AssetKey(asset), check)
    records = instance.event_log_storage.get_asset_check_execution_history(key, limit=99)
    return {record.partition: record.status.value for record in reversed(records)}


def by_day(*states: str) -> dict[str | None, str]:
    return {f"2026-01-0{day}": state for day, state in enumerate(states, start=1)}


@pytest.mark.parametrize("is_spec_partitioned", [True, False])
def test_rank_zero_reports_a_check_for_each_partition(
    is_spec_partitioned: bool, resources: dict[str, object], instance: dg.DagsterInstance
) -> None:
    spec = dg.AssetCheckSpec("finite", asset="model", partitions_def=DAYS if is_spec_partitioned else None)

    @torch_asset(partitions_def=DAYS, backfill_policy=SINGLE_RUN, check_specs=[spec])
    def model(partition_keys: list[str]) -> dict[str, int]:
        for key in partition_keys:
            rt.report({f"check/finite/{key}": key != "2026-01-02"})
        return dict.fromkeys(partition_keys, 1)

    assert dg.materialize([model], resources=resources, instance=instance, tags=RANGE).success
    assert history(instance, "model", "finite") == by_day("SUCCEEDED", "FAILED", "SUCCEEDED")
    again = dg.materialize([model], resources=resources, instance=instance, partition_key="2026-01-02")
    (evaluation,) = again.get_asset_check_evaluations()
    assert (evaluation.partition, evaluation.passed) == ("2026-01-02", False)


def test_a_value_without_a_partition_speaks_for_none_of_several(
    resources: dict[str, object], instance: dg.DagsterInstance
) -> None:
    @torch_multi_asset(
        outs={"model": dg.AssetOut()},
        partitions_def=DAYS,
        backfill_policy=SINGLE_RUN,
        check_specs=[dg.AssetCheckSpec("finite", asset="model", blocking=True)],
    )
    def training(partition_keys: list[str]) -> dict[str, dict[str, int]]:
        rt.report({"check/finite": True})
        return {"model": dict.fromkeys(partition_keys, 1)}

    result = dg.materialize([training], resources=resources, instance=instance, tags=RANGE, raise_on_error=False)
    assert not result.success
    assert history(instance, "model", "finite") == by_day("FAILED", "FAILED", "FAILED")
    first, *_ = result.get_asset_check_evaluations()
    assert f"check/finite/{first.partition}" in str(first.description)
    assert dg.materialize([training], resources=resources, instance=instance, partition_key="2026-01-03").success
    assert history(instance, "model", "finite") == by_day("FAILED", "FAILED", "SUCCEEDED")


def test_bounds_are_checked_for_each_partition(instance: dg.DagsterInstance) -> None:
    @dg.asset(partitions_def=DAYS, backfill_policy=SINGLE_RUN)
    def model(context: dg.AssetExecutionContext) -> None:
        for key, loss in zip(context.partition_keys, (0.1, 9.0, 0.2), strict=True):
            context.add_asset_metadata({"loss": loss}, partition_key=key)

    checks = build_metric_bounds_checks(model, {"loss": (None, 1.0)}, blocking=False)
    alone = build_metric_bounds_checks(dg.AssetSpec("model", partitions_def=DAYS), {"loss": (0.15, None)})
    assert dg.materialize([model, *checks], instance=instance, tags=RANGE).success
    assert history(instance, "model", "loss_within_bounds") == by_day("SUCCEEDED", "FAILED", "SUCCEEDED")
    # A job of checks alone, of an asset that another program materializes.
    job = dg.define_asset_job("check", dg.AssetSelection.checks(*alone))
    defs = dg.Definitions([dg.AssetSpec("model", partitions_def=DAYS)], asset_checks=alone, jobs=[job])
    result = defs.resolve_job_def("check").execute_in_process(instance=instance, tags=RANGE, raise_on_error=False)
    assert not result.success
    assert history(instance, "model", "loss_within_bounds") == by_day("FAILED", "SUCCEEDED", "SUCCEEDED")
    stored = {
        record.partition_key: record.storage_id
        for record in instance.fetch_materializations(dg.AssetKey("model"), 9).records
    }
    for evaluation in result.get_asset_check_evaluations():
        assert evaluation.target_materialization_data.storage_id == stored[evaluation.partition]


def test_a_check_that_runs_without_a_partition_judges_the_newest_one(instance: dg.DagsterInstance) -> None:
    regions = dg.StaticPartitionsDefinition(["eu", "us"])
    specs = [dg.AssetSpec(name, partitions_def=regions) for name in ("model", "champion")]
    for name, region, accuracy in (("champion", "eu", 0.5), ("champion", "us", 0.9), ("model", "eu", 0.7)):
        shown = dg.AssetMaterialization(name, partition=region, metadata={"accuracy": accuracy})
        instance.report_runless_asset_event(shown)
    check = build_champion_check(*specs, "accuracy", blocking=False)
    jobs = [dg.define_asset_job("check", dg.AssetSelection.checks(check))]
    defs = dg.Definitions(specs, asset_checks=[check], jobs=jobs)
    assert defs.resolve_job_def("check").execute_in_process(instance=instance).success
    assert history(instance, "model", "accuracy_beats_champion") == {None: "FAILED"}
