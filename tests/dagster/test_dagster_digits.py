"""The example pipeline as people run it, on a real instance with a process for every step."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import dagster as dg
import pytest
import torch
from tests.conftest import ROOT
from tests.runs import job_file

from dagster_rankzero import TorchDistributorResource
from rankzero import ResultRef

EXAMPLES = ROOT / "example_dags"
PIPELINE = EXAMPLES / "dagster" / "digits_retraining.py"


@pytest.fixture
def digits_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place without a champion, and a store for the runs."""
    monkeypatch.setenv("DIGITS_HOME", str(tmp_path / "digits"))
    monkeypatch.setenv("RANKZERO_STORE", str(tmp_path / "runs"))
    monkeypatch.delenv("SPARK_MASTER", raising=False)
    return tmp_path / "digits"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module, found as Dagster finds it."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location("digits_retraining", PIPELINE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "digits_retraining", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def definitions(example: ModuleType, torch_distributor: TorchDistributorResource) -> dg.Definitions:
    """The example's, with ranks of this machine."""
    given = example.defs
    resources = {**given.resources, "torch_distributor": torch_distributor}
    return dg.Definitions(given.assets, jobs=given.jobs, asset_checks=given.asset_checks, resources=resources)


# The processes of the steps are forks of one that has imported what they need.
FORKED = """
execution: {config: {multiprocess: {start_method: {forkserver: {preload_modules: [dagster_rankzero, sklearn, torch]}}}}}
"""


# By default: the two below, Airflow's nightly pipeline, and Spark in `test_sparks_handler_of_signals_does_not_stay`.
@pytest.mark.soak
def test_the_pipeline_trains_on_spark_and_promotes_a_good_model(digits_home: Path, tmp_path: Path) -> None:
    settings = tmp_path / "run.yaml"
    settings.write_text(FORKED)
    command = [sys.executable, "-m", "dagster", "job", "execute", "-j", "digits_retraining", "-c", str(settings)]
    done = subprocess.run(
        [*command, "-f", str(PIPELINE), "-d", str(EXAMPLES)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-8000:]
    with dg.DagsterInstance.get() as instance:
        (run,) = instance.get_runs()
        assert run.status is dg.DagsterRunStatus.SUCCESS
        logged = [record.event_log_entry for record in instance.get_records_for_run(run.run_id).records]
        shown = instance.get_latest_materialization_event(dg.AssetKey("model")).asset_materialization.metadata
    pids = {entry.dagster_event.pid for entry in logged if entry.dagster_event and entry.dagster_event.pid}
    assert len(pids) > 4
    assert shown["world_size"].value == 2
    assert shown["format"].value == "torch"
    assert shown["metric/loss"].value < 0.5
    job = json.loads(job_file(shown["run_directory"].value).read_text())
    assert job["engine"]["kind"] == "spark"
    champion = json.loads((digits_home / "champion.json").read_text())
    assert champion["accuracy"] >= 0.95
    weights = ResultRef.from_json(champion["model"]).load()
    assert sum(tensor.numel() for tensor in weights.values()) == shown["parameters"].value
    assert all(isinstance(tensor, torch.Tensor) for tensor in weights.values())


def test_a_model_that_does_not_beat_the_champion_is_not_promoted(
    example: ModuleType, digits_home: Path, definitions: dg.Definitions, instance: dg.DagsterInstance
) -> None:
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
    example: ModuleType, digits_home: Path, definitions: dg.Definitions, instance: dg.DagsterInstance
) -> None:
    (schedule,) = example.defs.schedules
    assert (schedule.cron_schedule, schedule.job_name) == ("0 3 * * *", "digits_retraining")
    before = dg.evaluate_automation_conditions(definitions, instance=instance)
    config = dg.RunConfig(ops={"model": example.TrainConfig(epochs=1)})
    nightly = definitions.resolve_job_def("digits_retraining")
    assert nightly.execute_in_process(run_config=config, instance=instance).success
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
