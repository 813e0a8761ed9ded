"""Every example pipeline, as its DAG file defines it."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.airflow.conftest import register
from tests.airflow.versions import RunDag
from tests.conftest import ROOT
from tests.handlers import restore_signal_handlers, signal_handlers
from tests.services import end_own_jvm

from rankzero import Launcher, ResultRef
from rankzero.run.directory import RunDirectory

EXAMPLES = ROOT / "example_dags"
DAY = 86400.0

LoadDag = Callable[[str], Any]
LoadDags = Callable[[str], dict[str, Any]]
GOOD_ACCURACY = 0.95


@pytest.fixture
def load_dags(airflow_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadDags:
    """The DAGs of a file, found as Airflow finds them, with a store and a champion's home of their own."""
    monkeypatch.setenv("RANKZERO_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("DIGITS_HOME", str(tmp_path / "digits"))
    # Without a JVM; the script runs on Spark.
    monkeypatch.setenv("DIGITS_CONN_ID", "here")
    # Airflow puts the DAG folder on the search path; the other tests shall not see it there.
    monkeypatch.setattr(sys, "path", list(sys.path))

    def load(name: str) -> dict[str, Any]:
        from airflow.dag_processing.dagbag import BundleDagBag

        file = EXAMPLES / "airflow" / name
        bag = BundleDagBag(dag_folder=file, bundle_path=EXAMPLES, bundle_name="dags-folder")
        assert bag.import_errors == {}
        return dict(bag.dags)

    return load


@pytest.fixture
def load_dag(load_dags: LoadDags) -> LoadDag:
    """The one DAG of a file."""

    def load(name: str) -> Any:
        (dag,) = load_dags(name).values()
        return dag

    return load


@pytest.mark.parametrize("name", sorted(file.name for file in (EXAMPLES / "airflow").glob("*.py")))
def test_file_is_a_dag_file_and_explained(name: str, load_dags: LoadDags) -> None:
    dags = load_dags(name)
    assert dags
    table = (EXAMPLES / "README.md").read_text()
    assert f"airflow/{name}" in table
    assert all(f"`{dag_id}`" in table for dag_id in dags)


def answer() -> int:
    return 42


def test_maintenance_shows_and_then_removes_what_is_old(
    load_dag: LoadDag, run_dag: RunDag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__RANKZERO__STORE", str(tmp_path / "configured"))
    for run_id in ("old", "young"):
        assert Launcher(1, store=tmp_path / "configured", run_id=run_id).run(answer) == 42
    run = RunDirectory(str(tmp_path / "configured" / "old")).current()
    ended = time.time() - 8 * DAY
    run.write_status(replace(run.status(), heartbeat=ended, ended=ended))
    dag = load_dag("maintenance.py")
    assert dag.schedule == "@daily"

    shown = run_dag(dag, run_conf={"days": 7, "dry_run": True})
    assert shown.state == "success", shown.errors
    (removed,) = shown.xcom("collect_runs")["removed"]
    assert removed["directory"] == run.run.directory
    assert run.status().state == "succeeded", "a dry run removes nothing"

    # Loaded anew, as a worker does: what a person gave to one run is not the next one's.
    done = run_dag(load_dag("maintenance.py"), run_conf={"days": 7})
    assert done.state == "success", done.errors
    assert done.xcom("collect_runs") == shown.xcom("collect_runs")
    assert run.run.newest()[1] is None
    assert RunDirectory(str(tmp_path / "configured" / "young")).newest()[1]


def test_sweep_keeps_the_best_of_its_trainings(load_dag: LoadDag, run_dag: RunDag, tmp_path: Path) -> None:
    from airflow.models.pool import Pool

    Pool.create_or_update_pool("gpus", 8, "", include_deferred=True)
    dag = load_dag("sweep.py")
    train = dag.get_task("train")
    assert (train.pool, train.partial_kwargs["pool_slots"]) == ("gpus", 2)

    # The second setting hardly learns in so little time.
    settings = [{"lr": 4e-3, "batch_size": 32}, {"lr": 1e-6, "batch_size": 64}]
    outcome = run_dag(dag, run_conf={"epochs": 2, "settings": settings})

    assert outcome.state == "success", outcome.errors
    chosen = outcome.xcom("choose")
    assert (chosen["lr"], chosen["batch_size"]) == (4e-3, 32)
    assert chosen["accuracy"] > 0.5
    model = ResultRef.from_json(chosen["model"])
    assert Path(model.uri).is_relative_to(tmp_path / "digits")
    import digits

    assert digits.accuracy(model.load(), digits.prepare()) > 0.5
    runs = [path for path in (tmp_path / "store").iterdir() if (path / "submissions" / "0.json").exists()]
    assert len(runs) == len(settings)


# Embedded Spark by default: `test_values_travel_by_themselves_or_by_reference` and the DAG `shipped`.
@pytest.mark.soak
def test_script_runs_on_the_cluster_of_the_connection(
    load_dag: LoadDag, run_dag: RunDag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_CLUSTER", json.dumps({"conn_type": "spark", "host": "local[2]"}))
    outcome = run_dag(load_dag("script_on_cluster.py"), run_conf={"epochs": 2, "learning_rate": 1e-3})
    assert outcome.state == "success", outcome.errors
    found = outcome.xcom("train")
    assert found["world_size"] == 2
    assert outcome.xcom("report") == f"accuracy {found['accuracy']:.3f} on 2 ranks"
    (job,) = (tmp_path / "store").glob("*/submissions/0.json")
    assert json.loads(job.read_text())["engine"]["master"] == "local[2]"


def test_deferred_training_gives_its_result_to_the_next_task(load_dag: LoadDag, run_dag: RunDag) -> None:
    outcome = run_dag(load_dag("deferred_training.py"), run_conf={"epochs": 2})
    assert outcome.state == "success", outcome.errors
    assert outcome.xcom("evaluate") > 0.3
    assert outcome.xcom("train").format == "torch"


# By default: Spark's tables in `tests/contract/data`.
@pytest.mark.soak
@pytest.mark.usefixtures("own_jvm")
def test_a_spark_table_becomes_a_scored_table(load_dag: LoadDag, run_dag: RunDag) -> None:
    outcome = run_dag(load_dag("table_training.py"))
    assert outcome.state == "success", outcome.errors
    assert outcome.xcom("promote")["accuracy"] > 0.8


@pytest.fixture
def own_jvm() -> Iterator[None]:
    """Ends the JVM that pyspark leaves in a process whose session was stopped, and gives back the SIGINT it took."""
    handlers = signal_handlers()
    yield
    from pyspark import SparkContext

    restore_signal_handlers(handlers)
    end_own_jvm()
    SparkContext._gateway = SparkContext._jvm = None


# -- the nightly pipeline ----------------------------------------------------------------------


def promotions(run_id: str) -> list[dict[str, Any]]:
    """What the events of the asset say that this run of the pipeline made."""
    from airflow.models.asset import AssetEvent, AssetModel
    from airflow.utils.session import create_session
    from sqlalchemy import select

    events = select(AssetEvent.extra).join(AssetModel, AssetModel.id == AssetEvent.asset_id)
    with create_session() as session:
        return list(
            session.scalars(events.where(AssetModel.name == "digits_champion", AssetEvent.source_run_id == run_id))
        )


def schedules_of(asset: str) -> list[str]:
    """The DAGs that Airflow runs when this asset is updated."""
    from airflow.models.asset import AssetModel, DagScheduleAssetReference
    from airflow.utils.session import create_session
    from sqlalchemy import select

    dag_ids = select(DagScheduleAssetReference.dag_id).join(AssetModel)
    with create_session() as session:
        return list(session.scalars(dag_ids.where(AssetModel.name == asset)))


def test_nightly_pipeline_trains_a_good_model_promotes_and_deploys_it(
    load_dags: LoadDags, run_dag: RunDag, tmp_path: Path
) -> None:
    dags = load_dags("digits_retraining.py")
    assert set(dags) == {"digits_retraining", "digits_deployment"}
    # Airflow knows which DAGs an asset starts.
    for each in dags.values():
        register(each)
    dag = dags["digits_retraining"]
    assert dag.schedule == "0 3 * * *"
    assert not dag.catchup
    # Without a JVM: the script of `test_examples.py` and the DAG `shipped` run on Spark.
    dag.get_task("train").conn_id = "here"
    # A third of the example's epochs is enough; with all of them Dagster's pipeline trains, with `make faults`.
    dag.get_task("train").op_kwargs["epochs"] = 8

    outcome = run_dag(dag)

    assert outcome.state == "success", outcome.errors
    accuracy = outcome.xcom("evaluate")
    assert accuracy >= GOOD_ACCURACY
    champion = json.loads((tmp_path / "digits" / "champion.json").read_text())
    assert champion["accuracy"] == accuracy
    assert champion["model"]["digest"] == outcome.xcom("train").digest
    assert Path(champion["model"]["uri"]).is_relative_to(tmp_path / "digits"), "it must outlive its run directory"
    (event,) = promotions(outcome.run_id)
    assert event == {key: champion["model"][key] for key in ("uri", "digest")} | {"accuracy": accuracy}
    assert schedules_of("digits_champion") == ["digits_deployment"]

    deployment = run_dag(dags["digits_deployment"])
    assert deployment.state == "success", deployment.errors
    manifest = json.loads((tmp_path / "digits" / "manifest.json").read_text())
    assert manifest == {**champion, "input": [1, 8, 8], "classes": 10}


def test_worse_model_is_not_promoted(load_dags: LoadDags, run_dag: RunDag, tmp_path: Path) -> None:
    reigning = {"accuracy": 1.1, "model": {}}
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "champion.json").write_text(json.dumps(reigning))
    dag = load_dags("digits_retraining.py")["digits_retraining"]
    dag.get_task("train").conn_id = "here"
    # One step of training is enough to be worse.
    dag.get_task("train").op_kwargs["epochs"] = 1

    outcome = run_dag(dag)

    assert outcome.state == "success", outcome.errors
    assert outcome.task_state("promote") == "skipped"
    assert promotions(outcome.run_id) == []
    assert json.loads((tmp_path / "digits" / "champion.json").read_text()) == reigning
