"""Every example, as its file defines it; on the local engine, for speed."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import dagster as dg
import pytest
from tests.conftest import ROOT
from tests.dagster.dagster_events import metadata_of

from dagster_rankzero import TorchDistributorResource
from rankzero import RunHandle

EXAMPLES = ROOT / "example_dags"

Load = Callable[[str], tuple[ModuleType, dg.Definitions]]


@pytest.fixture
def load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch_distributor: TorchDistributorResource, assets_path: Path
) -> Load:
    """An example's module, and its definitions with two ranks of this machine in the cluster's place."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def found(name: str) -> tuple[ModuleType, dg.Definitions]:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / "dagster" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        given = module.defs
        resources = {**given.resources, "torch_distributor": torch_distributor}
        definitions = dg.Definitions(
            given.assets, jobs=given.jobs, asset_checks=given.asset_checks, resources=resources
        )
        return module, definitions

    return found


def run(
    defs: dg.Definitions, key: str, instance: dg.DagsterInstance, partition: str | None = None
) -> dg.ExecuteInProcessResult:
    """Materializes one asset with its checks."""
    chosen = dg.AssetSelection.assets(key)
    return dg.materialize(
        [*defs.assets, *(defs.asset_checks or ())],
        selection=chosen,
        resources=defs.resources,
        instance=instance,
        partition_key=partition,
    )


def test_each_day_starts_from_the_weights_of_the_day_before(load: Load, instance: dg.DagsterInstance) -> None:
    _, defs = load("partitioned_training")
    losses = {}
    for day in ("2026-01-01", "2026-01-02", "2026-01-04"):
        run(defs, "daily_scans", instance, day)
        result = run(defs, "daily_model", instance, day)
        run_directory = metadata_of(result, "daily_model")["run_directory"]
        losses[day] = next(iter(RunHandle.attach(run_directory).metrics()))["loss"]
        (evaluation,) = result.get_asset_check_evaluations()
        assert evaluation.passed
    # The third of January was lost: the fourth starts from scratch, like the first.
    assert losses["2026-01-02"] < min(losses["2026-01-01"], losses["2026-01-04"])


# By default: the same example in Airflow.
@pytest.mark.soak
def test_a_sweep_keeps_the_best_setting(load: Load, instance: dg.DagsterInstance) -> None:
    module, defs = load("sweep")
    run(defs, "sweep_scans", instance)
    accuracy = {}
    for name in module.SETTINGS:
        accuracy[name] = metadata_of(run(defs, "candidate", instance, name), "candidate")["metric/accuracy"]
    shown = metadata_of(run(defs, "best", instance), "best")
    assert shown["setting"] == max(accuracy, key=accuracy.get)
    assert shown["metric/accuracy"] == max(accuracy.values())
    assert len(set(accuracy.values())) == 3


def test_a_script_is_an_asset(load: Load, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIGITS_EPOCHS", "2")
    _, defs = load("script_training")
    result = run(defs, "script_scores", instance)
    scores = result.output_for_node("script_scores").load()
    assert scores["world_size"] == 2
    assert 0.1 < scores["accuracy"] <= 1
    event = instance.get_latest_materialization_event(dg.AssetKey("script_scores"))
    shown = metadata_of(result, "script_scores")
    assert event.asset_materialization.tags["dagster/data_version"] == shown["sha256"]


# By default: Spark's tables in `tests/contract/data`, and the examples above.
@pytest.mark.soak
def test_a_spark_table_becomes_a_scored_table(
    load: Load, instance: dg.DagsterInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIGITS_HOME", str(tmp_path / "digits"))
    _, defs = load("table_training")
    for key in ("scan_features", "table_model", "table_scores"):
        result = run(defs, key, instance)
    (evaluation,) = result.get_asset_check_evaluations()
    assert evaluation.passed
    champion = run(defs, "table_champion", instance).output_for_node("table_champion")
    assert champion["accuracy"] > 0.8
    # Every fifth scan, four times.
    assert result.output_for_node("table_scores").to_arrow().count_rows() == 360 * 4


# -- the nightly pipeline; `make demo` runs it on Spark, with a process for each step -----------


@pytest.fixture
def nightly(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, dg.Definitions, Path]:
    """The module, its definitions, and a place without a champion."""
    monkeypatch.setenv("DIGITS_HOME", str(tmp_path / "digits"))
    module, definitions = load("digits_retraining")
    return module, definitions, tmp_path / "digits"


def test_a_model_that_does_not_beat_the_champion_is_not_promoted(
    nightly: tuple[ModuleType, dg.Definitions, Path], instance: dg.DagsterInstance
) -> None:
    example, definitions, digits_home = nightly
    digits_home.mkdir()
    reigning = {"accuracy": 0.9999, "model": {}}
    (digits_home / "champion.json").write_text(json.dumps(reigning))
    result = definitions.resolve_job_def("digits_retraining").execute_in_process(
        run_config=dg.RunConfig(ops={"model": example.TrainConfig(epochs=1)}), instance=instance, raise_on_error=False
    )
    assert not result.success
    (evaluation,) = result.get_asset_check_evaluations()
    assert (evaluation.check_name, evaluation.passed) == ("beats_champion", False)
    assert "champion" not in {event.asset_key.to_user_string() for event in result.get_asset_materialization_events()}
    assert json.loads((digits_home / "champion.json").read_text()) == reigning


def test_every_night_a_new_champion_deploys_itself_and_must_be_fresh(
    nightly: tuple[ModuleType, dg.Definitions, Path], instance: dg.DagsterInstance
) -> None:
    example, definitions, digits_home = nightly
    (schedule,) = example.defs.schedules
    assert (schedule.cron_schedule, schedule.job_name) == ("0 3 * * *", "digits_retraining")
    before = dg.evaluate_automation_conditions(definitions, instance=instance)
    config = dg.RunConfig(ops={"model": example.TrainConfig(epochs=1)})
    job = definitions.resolve_job_def("digits_retraining")
    assert job.execute_in_process(run_config=config, instance=instance).success
    after = dg.evaluate_automation_conditions(definitions, instance=instance, cursor=before.cursor)
    assert (before.total_requested, after.total_requested) == (0, 1)
    assert after.get_num_requested(dg.AssetKey("deployment")) == 1
    deployed = dg.materialize(
        definitions.assets, selection=["deployment"], resources=definitions.resources, instance=instance
    )
    assert deployed.success
    champion = json.loads((digits_home / "champion.json").read_text())
    assert json.loads((digits_home / "manifest.json").read_text())["model"] == champion["model"]
    policy = definitions.resolve_assets_def("champion").get_asset_spec().freshness_policy
    assert policy.fail_window.to_timedelta().days == 7
