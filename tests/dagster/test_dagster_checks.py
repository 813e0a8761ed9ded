"""Ready checks: bounds of metrics, and the comparison with the champion."""

import math

import dagster as dg
import pytest

import rankzero.train as rt
from dagster_rankzero import build_champion_check, build_metric_bounds_checks, torch_asset
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
    job = dg.Definitions(
        assets=[dg.AssetSpec("challenger")],
        asset_checks=[check],
        jobs=[dg.define_asset_job("check", dg.AssetSelection.checks(check))],
    ).resolve_job_def("check")
    assert verdicts(job.execute_in_process(instance=instance, raise_on_error=False)) == {"loss_beats_champion": passed}


DAYS = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-04")
REGIONS = dg.StaticPartitionsDefinition(["eu", "us"])
BOTH = dg.MultiPartitionsDefinition({"day": DAYS, "region": REGIONS})


@pytest.mark.parametrize(
    ("partitions", "champions", "partition", "passed"),
    [
        (REGIONS, {"eu": 0.9, "us": 0.5}, "eu", False),
        (REGIONS, {"us": 0.9, "eu": 0.5}, "eu", True),
        (REGIONS, {"us": 0.9}, "eu", True),
        (DAYS, {"2026-01-01": 0.9, "2026-01-02": 0.5}, "2026-01-03", True),
        (DAYS, {"2026-01-01": 0.5, "2026-01-02": 0.9}, "2026-01-03", False),
        (BOTH, {"2026-01-01|eu": 0.9, "2026-01-02|us": 0.5}, "2026-01-03|eu", False),
        (BOTH, {"2026-01-01|eu": 0.5, "2026-01-02|us": 0.9}, "2026-01-03|eu", True),
        (BOTH, {"2026-01-02|us": 0.9}, "2026-01-03|eu", True),
        (dg.DynamicPartitionsDefinition(name="sites"), {"a": 0.9, "b": 0.5}, "a", False),
        (None, {None: 0.9}, "2026-01-03", False),
    ],
    ids=range(10),
)
def test_a_model_is_compared_with_the_champion_of_its_region_and_of_any_day(
    partitions: dg.PartitionsDefinition[str] | None,
    champions: dict[str | None, float],
    partition: str,
    passed: bool,
    instance: dg.DagsterInstance,
) -> None:
    instance.add_dynamic_partitions("sites", ["a", "b"])
    challenger = dg.AssetSpec("challenger", partitions_def=partitions or DAYS)
    check = build_champion_check(challenger, dg.AssetSpec("champion", partitions_def=partitions), "accuracy")
    for champion, accuracy in champions.items():
        shown = dg.AssetMaterialization("champion", partition=champion, metadata={"accuracy": accuracy})
        instance.report_runless_asset_event(shown)

    @dg.asset(key="challenger", partitions_def=partitions or DAYS)
    def train() -> dg.MaterializeResult[None]:
        return dg.MaterializeResult(metadata={"accuracy": 0.7})

    result = dg.materialize([train, check], instance=instance, partition_key=partition, raise_on_error=False)
    assert verdicts(result) == {"accuracy_beats_champion": passed}


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


SUNDAYS = dg.WeeklyPartitionsDefinition("2026-01-04")
SITES = dg.DynamicPartitionsDefinition(name="sites")


@pytest.mark.parametrize(
    ("partitions", "models", "partition", "judged"),
    [
        # One model, trained by the job of a day.
        pytest.param(None, {None: 0.7}, "2026-01-02", 0.7, id="none"),
        pytest.param(DAYS, {"2026-01-01": 0.9}, "2026-01-02", None, id="the run's, not trained"),
        pytest.param(SUNDAYS, {"2026-01-04": 0.5, "2026-01-11": 0.9}, "2026-01-14", 0.9, id="others than the run's"),
        pytest.param(SITES, {"a": 0.9, "b": 0.5}, "a", 0.9, id="dynamic"),
        pytest.param(BOTH, {"2026-01-01|eu": 0.9, "2026-01-01|us": 0.5}, "2026-01-01|eu", 0.9, id="two dimensions"),
        pytest.param(BOTH, {"2026-01-01|eu": 0.9, "2026-01-01|us": 0.5}, "2026-01-01", 0.5, id="one of two dimensions"),
        pytest.param("elsewhere", {"a": 0.9, "b": 0.5}, "a", 0.9, id="those of another code location"),
        pytest.param("elsewhere", {None: 0.7}, "a", 0.7, id="none in another code location"),
    ],
)
def test_the_checked_asset_s_own_partition_counts(
    partitions: dg.PartitionsDefinition[str] | str | None,
    models: dict[str | None, float],
    partition: str,
    judged: float | None,
    instance: dg.DagsterInstance,
) -> None:
    instance.add_dynamic_partitions("sites", ["a", "b"])
    for model, accuracy in models.items():
        shown = dg.AssetMaterialization("challenger", partition=model, metadata={"accuracy": accuracy})
        instance.report_runless_asset_event(shown)
    instance.add_dynamic_partitions("any", [partition])
    is_here = not isinstance(partitions, str)

    @dg.asset(partitions_def=BOTH if "|" in partition else dg.DynamicPartitionsDefinition(name="any"))
    def features() -> None: ...

    checks = [
        *build_metric_bounds_checks("challenger", {"accuracy": (0.0, None)}, blocking=False),
        build_champion_check("challenger", "champion", "accuracy", blocking=False),
    ]
    job = dg.Definitions(
        assets=[features, *([dg.AssetSpec("challenger", partitions_def=partitions)] if is_here else [])],
        asset_checks=checks,
        jobs=[dg.define_asset_job("daily", dg.AssetSelection.assets(features) | dg.AssetSelection.checks(*checks))],
    ).resolve_job_def("daily")
    evaluations = job.execute_in_process(partition_key=partition, instance=instance).get_asset_check_evaluations()
    for evaluation in evaluations:
        found = [evaluation.metadata[name].value for name in ("accuracy", "challenger") if name in evaluation.metadata]
        assert found == ([] if judged is None else [judged])
        assert evaluation.passed is (judged is not None)
        assert judged is not None or "no materialization" in str(evaluation.description)
    assert len(evaluations) == 2


@pytest.mark.parametrize("pair", [(None, None), (2.0, 1.0)])
def test_bounds_that_bound_nothing_are_refused(pair: tuple[float | None, float | None]) -> None:
    with pytest.raises(dg.DagsterInvalidDefinitionError, match="accuracy"):
        build_metric_bounds_checks("model", {"accuracy": pair})
