"""Ready checks: bounds of metrics, and the comparison with the champion."""

import math
from typing import Any

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


@pytest.mark.parametrize(("names", "is_full"), [(999, False), (1000, True)])
def test_a_metric_beyond_those_that_a_run_keeps_is_explained(
    names: int, is_full: bool, instance: dg.DagsterInstance
) -> None:
    (check,) = build_metric_bounds_checks("model", {"accuracy": (0.9, None)})
    shown = {f"metric/norm/{number}": 0.5 for number in range(names)}
    instance.report_runless_asset_event(dg.AssetMaterialization("model", metadata=shown))
    (evaluation,) = checked(check, dg.AssetSpec("model"), instance).get_asset_check_evaluations()
    assert not evaluation.passed
    assert ("keeps the first 1000 names of metrics: report fewer" in str(evaluation.description)) == is_full


DAYS = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-04")
REGIONS = dg.StaticPartitionsDefinition(["eu", "us"])
SITES = dg.DynamicPartitionsDefinition(name="sites")
BOTH = dg.MultiPartitionsDefinition({"day": DAYS, "region": REGIONS})
WIDER = dg.StaticPartitionsDefinition(["apac", "eu", "us"])
TIERS = dg.MultiPartitionsDefinition({"region": REGIONS, "tier": dg.StaticPartitionsDefinition(["high", "low"])})
AREAS = dg.MultiPartitionsDefinition({"area": REGIONS, "date": DAYS})
NUMBERS = dg.StaticPartitionsDefinition(["1", "2"])
FOLDS = dg.MultiPartitionsDefinition({"fold": NUMBERS, "seed": dg.StaticPartitionsDefinition(["1", "2", "3"])})


# The challenger's partitions and the run's, the champion's and its models, and whether an accuracy of 0.7 passes.
COMPARED = [
    pytest.param(REGIONS, "eu", REGIONS, {"eu": 0.9, "us": 0.5}, False, id="worse than its region's"),
    pytest.param(REGIONS, "eu", REGIONS, {"us": 0.9, "eu": 0.5}, True, id="better than its region's"),
    pytest.param(REGIONS, "eu", REGIONS, {"us": 0.9}, True, id="its region's first"),
    pytest.param(DAYS, "2026-01-03", DAYS, {"2026-01-01": 0.9, "2026-01-02": 0.5}, True, id="better than the newest"),
    pytest.param(DAYS, "2026-01-03", DAYS, {"2026-01-01": 0.5, "2026-01-02": 0.9}, False, id="worse than the newest"),
    pytest.param(BOTH, "2026-01-03|eu", BOTH, {"2026-01-01|eu": 0.9, "2026-01-02|us": 0.5}, False, id="any day's"),
    pytest.param(BOTH, "2026-01-03|eu", BOTH, {"2026-01-01|eu": 0.5, "2026-01-02|us": 0.9}, True, id="better, any day"),
    pytest.param(BOTH, "2026-01-03|eu", BOTH, {"2026-01-02|us": 0.9}, True, id="its region's first on any day"),
    pytest.param(SITES, "a", SITES, {"a": 0.9, "b": 0.5}, False, id="dynamic"),
    pytest.param(DAYS, "2026-01-03", None, {None: 0.9}, False, id="one champion"),
    pytest.param(BOTH, "2026-01-02|eu", REGIONS, {"eu": 0.9, "us": 0.5}, False, id="worse than the region's"),
    pytest.param(BOTH, "2026-01-02|eu", REGIONS, {"eu": 0.5, "us": 0.9}, True, id="better than the region's"),
    pytest.param(BOTH, "2026-01-02|eu", REGIONS, {"us": 0.9}, True, id="the region's first"),
    pytest.param(BOTH, "2026-01-02|eu", WIDER, {"eu": 0.9, "us": 0.5}, False, id="unequal regions"),
    pytest.param(BOTH, "2026-01-02|eu", DAYS, {"2026-01-02": 0.9, "2026-01-01": 0.5}, True, id="the newest"),
    pytest.param(BOTH, "2026-01-02|eu", TIERS, {"eu|high": 0.9, "us|low": 0.5}, False, id="a dimension in common"),
    pytest.param(BOTH, "2026-01-02|eu", AREAS, {"eu|2026-01-01": 0.9, "us|2026-01-02": 0.5}, False, id="renamed"),
    pytest.param(FOLDS, "1|2", NUMBERS, {"1": 0.9, "2": 0.5}, False, id="equal partitions, not equal keys"),
    pytest.param(REGIONS, "eu", BOTH, {"2026-01-01|eu": 0.9, "2026-01-02|us": 0.5}, False, id="of any day"),
    pytest.param(REGIONS, "eu", BOTH, {"2026-01-01|eu": 0.5, "2026-01-02|us": 0.9}, True, id="better than any day's"),
]


@pytest.mark.parametrize(("challengers", "partition", "partitions", "champions", "passed"), COMPARED)
def test_a_model_is_compared_with_the_champion_of_its_region_and_of_any_day(
    challengers: dg.PartitionsDefinition[str],
    partition: str,
    partitions: dg.PartitionsDefinition[str] | None,
    champions: dict[str | None, float],
    passed: bool,
    instance: dg.DagsterInstance,
) -> None:
    instance.add_dynamic_partitions("sites", ["a", "b"])
    check = build_champion_check("challenger", dg.AssetSpec("champion", partitions_def=partitions), "accuracy")
    for champion, accuracy in champions.items():
        shown = dg.AssetMaterialization("champion", partition=champion, metadata={"accuracy": accuracy})
        instance.report_runless_asset_event(shown)

    @dg.asset(key="challenger", partitions_def=challengers)
    def train() -> dg.MaterializeResult[None]:
        return dg.MaterializeResult(metadata={"accuracy": 0.7})

    result = dg.materialize([train, check], instance=instance, partition_key=partition, raise_on_error=False)
    assert verdicts(result) == {"accuracy_beats_champion": passed}


SINGLE_RUN = dg.BackfillPolicy.single_run()


def over(first: str, last: str) -> dict[str, str]:
    return {"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": last}


def rows_of(evaluation: dg.AssetCheckEvaluation) -> dict[str, dict[str, object]]:
    table = evaluation.metadata["partitions"]
    assert isinstance(table, dg.TableMetadataValue)
    return {str(record.data["partition"]): dict(record.data) for record in table.records}


@pytest.mark.parametrize(
    ("partitions", "first", "last", "shown", "failing"),
    [
        (REGIONS, "eu", "us", {"eu": (0.7, 0.9), "us": (0.7, 0.6)}, ["eu"]),
        (REGIONS, "us", "us", None, []),
        (BOTH, "2026-01-02|eu", "2026-01-02|us", {"2026-01-02|eu": (0.7, 0.9), "2026-01-02|us": (0.7, 0.6)}, ["eu"]),
        (None, "eu", "us", {"eu": (0.7, 0.9), "us": (0.7, 0.6)}, ["eu"]),
    ],
    ids=["regions", "a range of one", "days and regions", "one model for all regions"],
)
def test_in_a_run_of_a_range_each_partition_is_compared_with_its_own_champion(
    partitions: dg.PartitionsDefinition[str] | None,
    first: str,
    last: str,
    shown: dict[str, tuple[float, float]] | None,
    failing: list[str],
    instance: dg.DagsterInstance,
) -> None:
    for region, accuracy in (("eu", 0.9), ("us", 0.6)):
        published = dg.AssetMaterialization("champion", partition=region, metadata={"accuracy": accuracy})
        instance.report_runless_asset_event(published)

    @dg.asset(key="challenger", partitions_def=partitions, backfill_policy=SINGLE_RUN if partitions else None)
    def train() -> dg.MaterializeResult[None]:
        return dg.MaterializeResult(metadata={"accuracy": 0.7})

    @dg.asset(partitions_def=partitions or REGIONS, backfill_policy=SINGLE_RUN)
    def features() -> None: ...

    check = build_champion_check(train, dg.AssetSpec("champion", partitions_def=REGIONS), "accuracy")
    result = dg.materialize([features, train, check], instance=instance, tags=over(first, last), raise_on_error=False)
    (evaluation,) = result.get_asset_check_evaluations()
    assert evaluation.passed is (failing == [])
    if shown is None:
        assert [evaluation.metadata[name].value for name in ("challenger", "champion")] == [0.7, 0.6]
        return
    rows = rows_of(evaluation)
    assert {key: (row["challenger"], row["champion"]) for key, row in rows.items()} == shown
    named = str(evaluation.description)
    assert [key.split("|")[-1] for key in rows if key in named] == failing


def test_in_a_run_of_a_range_each_partition_must_be_within_the_bounds(instance: dg.DagsterInstance) -> None:
    @dg.asset(partitions_def=DAYS, backfill_policy=SINGLE_RUN)
    def model(context: dg.AssetExecutionContext) -> None:
        for key, loss in zip(context.partition_keys, (0.1, 9.0, 0.2), strict=True):
            context.add_asset_metadata({"loss": loss}, partition_key=key)

    checks = build_metric_bounds_checks(model, {"loss": (None, 1.0)}, blocking=False)
    tags = over("2026-01-01", "2026-01-03")
    trained = dg.materialize([model, *checks], instance=instance, tags=tags)
    # A job of checks alone, of an asset that another program materializes.
    alone = checked(checks[0], dg.AssetSpec("model", partitions_def=DAYS), instance, tags=tags)
    for result in (trained, alone):
        (evaluation,) = result.get_asset_check_evaluations()
        assert not evaluation.passed
        assert evaluation.description == "1 of 3 partitions fail: 2026-01-02"
        assert [row["loss"] for row in rows_of(evaluation).values()] == [0.1, 9.0, 0.2]


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


@pytest.mark.parametrize(
    "pair", [(None, None), (2.0, 1.0), 0.5, "01", (0.5,), (0.0, 0.5, 1.0), ("0", "1"), (math.nan, None), {0.1, 0.5}]
)
def test_bounds_that_bound_nothing_are_refused(pair: Any) -> None:
    with pytest.raises(dg.DagsterInvalidDefinitionError, match="accuracy") as caught:
        build_metric_bounds_checks("model", {"accuracy": pair})
    assert repr(pair) in str(caught.value)
