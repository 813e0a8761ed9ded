"""Ready checks: bounds of metrics, and the comparison with the champion."""

import math
from typing import Any

import dagster as dg
import pytest
from tests.dagster.dagster_events import failure_of

import rankzero.train as rt
from dagster_rankzero import build_champion_check, build_metric_bounds_checks, torch_asset, torch_multi_asset
from rankzero import ResultRef

LETTERS = dg.StaticPartitionsDefinition(["a", "b"])


class TrainConfig(dg.Config):
    accuracy: float


@torch_asset
def model(config: TrainConfig) -> dict[str, float]:
    rt.report({"accuracy": config.accuracy})
    return {"trained_to": config.accuracy}


@dg.asset
def champion(model: ResultRef) -> ResultRef:
    return model


def train(
    accuracy: float, checks: list[dg.AssetChecksDefinition], resources: dict[str, object], instance: dg.DagsterInstance
) -> dg.ExecuteInProcessResult:
    # The metrics of a training go along with its handle, not with its value.
    by_reference = {**resources, "torch_distributor": resources["torch_distributor"].options(by_reference=True)}
    config = dg.RunConfig(ops={"model": TrainConfig(accuracy=accuracy)})
    return dg.materialize(
        [model, champion, *checks], resources=by_reference, instance=instance, run_config=config, raise_on_error=False
    )


def verdicts(result: dg.ExecuteInProcessResult) -> dict[str, bool]:
    return {evaluation.check_name: evaluation.passed for evaluation in result.get_asset_check_evaluations()}


def checked(
    check: dg.AssetChecksDefinition, asset: dg.AssetSpec, instance: dg.DagsterInstance, **more: Any
) -> dg.ExecuteInProcessResult:
    """Runs a job of a check alone."""
    job = dg.define_asset_job("check", dg.AssetSelection.checks(check))
    defs = dg.Definitions([asset], asset_checks=[check], jobs=[job])
    return defs.resolve_job_def("check").execute_in_process(instance=instance, raise_on_error=False, **more)


def stored(instance: dg.DagsterInstance, resources: dict[str, object]) -> object:
    return dg.Definitions([model, champion], resources=resources).load_asset_value(
        "champion", python_type=object, instance=instance
    )


def test_only_a_model_as_good_as_the_champion_is_published(
    resources: dict[str, object], instance: dg.DagsterInstance
) -> None:
    checks = [build_champion_check(model, champion, "accuracy")]
    passed = [
        verdicts(train(accuracy, checks, resources, instance))["accuracy_beats_champion"]
        for accuracy in (0.8, 0.7, 0.9)
    ]
    assert passed == [True, False, True]
    assert stored(instance, resources) == {"trained_to": 0.9}
    train(0.85, checks, resources, instance)
    assert stored(instance, resources) == {"trained_to": 0.9}


@pytest.mark.parametrize(
    ("options", "challenger", "passed"),
    [
        ({"higher_is_better": False}, 0.6, False),
        ({"higher_is_better": False}, 0.4, True),
        ({"min_improvement": 0.2}, 0.6, False),
        ({"min_improvement": -0.2}, 0.4, True),
        ({}, math.nan, False),
    ],
)
def test_what_counts_as_better(
    options: dict[str, object], challenger: float, passed: bool, instance: dg.DagsterInstance
) -> None:
    check = build_champion_check("challenger", "champion", "loss", **options)
    for key, value in (("champion", 0.5), ("challenger", challenger)):
        shown = {"loss": value} if math.isfinite(value) else {"loss": str(value)}
        instance.report_runless_asset_event(dg.AssetMaterialization(key, metadata=shown))
    assert verdicts(checked(check, dg.AssetSpec("challenger"), instance)) == {"loss_beats_champion": passed}


DAYS = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-04")


@pytest.mark.parametrize(("champions", "passed"), [((0.9, 0.5), True), ((0.5, 0.9), False)])
def test_the_newest_champion_counts_whatever_its_partition(
    champions: tuple[float, float], passed: bool, instance: dg.DagsterInstance
) -> None:
    @dg.asset(partitions_def=DAYS)
    def challenger() -> dg.MaterializeResult[None]:
        return dg.MaterializeResult(metadata={"accuracy": 0.7})

    for day, accuracy in zip(("2026-01-01", "2026-01-02"), champions, strict=True):
        shown = dg.AssetMaterialization("champion", partition=day, metadata={"accuracy": accuracy})
        instance.report_runless_asset_event(shown)
    check = build_champion_check(challenger, "champion", "accuracy")
    result = dg.materialize([challenger, check], instance=instance, partition_key="2026-01-03", raise_on_error=False)
    (evaluation,) = result.get_asset_check_evaluations()
    assert (evaluation.partition, evaluation.passed) == ("2026-01-03", passed)


def test_metrics_out_of_bounds_or_never_reported_stop_what_comes_after(
    resources: dict[str, object], instance: dg.DagsterInstance
) -> None:
    checks = build_metric_bounds_checks(model, {"accuracy": (0.5, 0.9), "f1": (0.5, None)})
    assert verdicts(train(0.7, checks, resources, instance)) == {
        "accuracy_within_bounds": True,
        "f1_within_bounds": False,
    }
    inside = build_metric_bounds_checks(model, {"accuracy": (0.5, 0.9)})
    for accuracy, published in ((0.95, False), (0.9, True), (0.4, True)):
        result = train(accuracy, inside, resources, instance)
        assert result.success is (0.5 <= accuracy <= 0.9)
        has = instance.get_latest_materialization_event(dg.AssetKey("champion")) is not None
        assert has is published
    assert stored(instance, resources) == {"trained_to": 0.9}


def test_a_partition_is_judged_by_its_own_metric(resources: dict[str, object], instance: dg.DagsterInstance) -> None:
    @dg.success_hook
    def another_is_trained_meanwhile(context: dg.HookContext) -> None:
        good = dg.AssetMaterialization("model", partition="a", metadata={"metric/loss": 0.1})
        context.instance.report_runless_asset_event(good)

    @torch_asset(partitions_def=LETTERS, hooks={another_is_trained_meanwhile})
    def model() -> None:
        rt.report({"loss": 9.0})

    checks = build_metric_bounds_checks(model, {"loss": (None, 1.0)}, blocking=False)
    result = dg.materialize([model, *checks], resources=resources, instance=instance, partition_key="b")
    assert verdicts(result) == {"loss_within_bounds": False}


@pytest.mark.parametrize(
    ("models", "judged"),
    [
        pytest.param({None: 0.7}, 0.7, id="one model, trained by the job of a day"),
        pytest.param({"a": 0.9, "b": 0.5}, 0.9, id="the run's partition"),
        pytest.param({"b": 0.5}, None, id="the run's partition was not trained"),
    ],
)
def test_a_check_by_key_alone_judges_the_partition_of_the_run_or_the_only_model(
    models: dict[str | None, float], judged: float | None, instance: dg.DagsterInstance
) -> None:
    for partition, accuracy in models.items():
        shown = dg.AssetMaterialization("challenger", partition=partition, metadata={"accuracy": accuracy})
        instance.report_runless_asset_event(shown)

    @dg.asset(partitions_def=LETTERS, backfill_policy=dg.BackfillPolicy.single_run())
    def features() -> None: ...

    checks = [
        *build_metric_bounds_checks("challenger", {"accuracy": (0.0, None)}, blocking=False),
        build_champion_check("challenger", "champion", "accuracy", blocking=False),
    ]
    selection = dg.AssetSelection.assets(features) | dg.AssetSelection.checks(*checks)
    defs = dg.Definitions([features], asset_checks=checks, jobs=[dg.define_asset_job("daily", selection)])
    job = defs.resolve_job_def("daily")
    evaluations = job.execute_in_process(partition_key="a", instance=instance).get_asset_check_evaluations()
    for evaluation in evaluations:
        found = [evaluation.metadata[name].value for name in ("accuracy", "challenger") if name in evaluation.metadata]
        assert found == ([] if judged is None else [judged])
        assert (evaluation.partition, evaluation.passed) == (None, judged is not None)
        assert judged is not None or "no materialization" in str(evaluation.description)
    assert len(evaluations) == 2
    both = {"dagster/asset_partition_range_start": "a", "dagster/asset_partition_range_end": "b"}
    several = job.execute_in_process(tags=both, instance=instance, raise_on_error=False)
    # One evaluation cannot speak for two partitions.
    assert several.success is (None in models)
    if not several.success:
        assert "partitions_def=" in failure_of(several, "challenger_accuracy_within_bounds")[0]


@pytest.mark.parametrize(
    "pair", [(None, None), (2.0, 1.0), 0.5, "01", (0.5,), (0.0, 0.5, 1.0), ("0", "1"), (math.nan, None), {0.1, 0.5}]
)
def test_bounds_that_bound_nothing_are_refused(pair: Any) -> None:
    with pytest.raises(dg.DagsterInvalidDefinitionError, match="accuracy") as caught:
        build_metric_bounds_checks("model", {"accuracy": pair})
    assert repr(pair) in str(caught.value)


# -- a run of several partitions: each has an evaluation of its own, as in a run of it alone ----

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
