"""Every example pipeline beside the nightly one, as its DAG file defines it."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import ROOT

from rankzero import Launcher, ResultRef
from rankzero.directory import RunDirectory

EXAMPLES = ROOT / "example_dags"
DAY = 86400.0

RunDag = Callable[..., Any]
LoadDag = Callable[[str], Any]


@pytest.fixture
def load_dag(airflow_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadDag:
    """The one DAG of a file, found as Airflow finds it, with a store and a champion's home of its own."""
    monkeypatch.setenv("RANKZERO_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("DIGITS_HOME", str(tmp_path / "digits"))
    # Airflow puts the DAG folder on the search path; the other tests shall not see it there.
    monkeypatch.setattr(sys, "path", list(sys.path))

    def load(name: str) -> Any:
        from airflow.dag_processing.dagbag import BundleDagBag

        file = EXAMPLES / "airflow" / name
        bag = BundleDagBag(dag_folder=file, bundle_path=EXAMPLES, bundle_name="dags-folder")
        assert bag.import_errors == {}
        (dag,) = bag.dags.values()
        return dag

    return load


def answer() -> int:
    return 42


def test_maintenance_shows_and_then_removes_what_is_old(
    load_dag: LoadDag, run_dag: RunDag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__RANKZERO__STORE", str(tmp_path / "configured"))
    monkeypatch.setenv("AIRFLOW__RANKZERO__RETENTION_DAYS", "7")
    for run_id in ("old", "young"):
        assert Launcher(1, store=tmp_path / "configured", run_id=run_id).run(answer) == 42
    run = RunDirectory(str(tmp_path / "configured" / "old"))
    ended = time.time() - 8 * DAY
    run.write_status(replace(run.status(), heartbeat=ended, ended=ended))
    dag = load_dag("maintenance.py")
    assert dag.schedule == "@daily"

    shown = run_dag(dag, run_conf={"dry_run": True})
    assert shown.state == "success", shown.errors
    (removed,) = shown.xcom("collect_runs")["removed"]
    assert removed["directory"] == run.directory
    assert run.status().state == "succeeded", "a dry run removes nothing"

    # Loaded anew, as a worker does: what a person gave to one run is not the next one's.
    done = run_dag(load_dag("maintenance.py"))
    assert done.state == "success", done.errors
    assert done.xcom("collect_runs") == {**shown.xcom("collect_runs"), "dry_run": False}
    assert [path.name for path in (tmp_path / "configured").iterdir()] == ["young"]


def test_sweep_keeps_the_best_of_its_trainings(load_dag: LoadDag, run_dag: RunDag, tmp_path: Path) -> None:
    from airflow.models.pool import Pool

    Pool.create_or_update_pool("gpus", 8, "", include_deferred=True)
    dag = load_dag("sweep.py")
    train = dag.get_task("train")
    assert (train.pool, train.partial_kwargs["pool_slots"]) == ("gpus", 2)

    outcome = run_dag(dag, run_conf={"epochs": 2})

    assert outcome.state == "success", outcome.errors
    chosen = outcome.xcom("choose")
    # The third setting hardly learns in so little time.
    assert chosen["lr"] in (4e-3, 1e-3)
    assert chosen["accuracy"] > 0.5
    model = ResultRef.from_json(chosen["model"])
    assert Path(model.uri).is_relative_to(tmp_path / "digits")
    import digits

    assert digits.accuracy(model.load(), digits.prepare()) > 0.5
    runs = [path for path in (tmp_path / "store").iterdir() if (path / "job.json").exists()]
    assert len(runs) == 3


def test_script_runs_on_the_cluster_of_the_connection(
    load_dag: LoadDag, run_dag: RunDag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_CLUSTER", json.dumps({"conn_type": "spark", "host": "local[2]"}))
    outcome = run_dag(load_dag("script_on_cluster.py"), run_conf={"epochs": 2, "learning_rate": 1e-3})
    assert outcome.state == "success", outcome.errors
    found = outcome.xcom("train")
    assert found["world_size"] == 2
    assert outcome.xcom("report") == f"accuracy {found['accuracy']:.3f} on 2 ranks"
    (job,) = (tmp_path / "store").glob("*/job.json")
    assert json.loads(job.read_text())["engine"]["master"] == "local[2]"
