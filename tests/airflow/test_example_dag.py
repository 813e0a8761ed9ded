"""The example pipeline as a whole, as its DAG file defines it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import ROOT

EXAMPLES = ROOT / "example_dags"
GOOD_ACCURACY = 0.95


@pytest.fixture
def dag_bag(airflow_home: Path, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("RANKZERO_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("DIGITS_HOME", str(tmp_path / "digits"))
    # Airflow puts the DAG folder on the search path; the other tests shall not see it there.
    monkeypatch.setattr(sys, "path", list(sys.path))
    from airflow.dag_processing.dagbag import BundleDagBag

    return BundleDagBag(dag_folder=EXAMPLES, bundle_path=EXAMPLES, bundle_name="dags-folder")


def test_nightly_pipeline_trains_a_good_model_and_promotes_it(
    dag_bag: Any, run_dag: Callable[..., Any], tmp_path: Path
) -> None:
    assert dag_bag.import_errors == {}
    assert set(dag_bag.dags) == {"digits_retraining"}
    dag = dag_bag.dags["digits_retraining"]
    assert dag.schedule == "0 3 * * *"
    assert not dag.catchup

    outcome = run_dag(dag)

    assert outcome.state == "success", outcome.errors
    accuracy = outcome.xcom("evaluate")
    assert accuracy >= GOOD_ACCURACY
    champion = json.loads((tmp_path / "digits" / "champion.json").read_text())
    assert champion["accuracy"] == accuracy
    assert champion["model"]["uri"] == outcome.xcom("train").uri


def test_worse_model_is_not_promoted(dag_bag: Any, run_dag: Callable[..., Any], tmp_path: Path) -> None:
    reigning = {"accuracy": 1.1, "model": {}}
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "champion.json").write_text(json.dumps(reigning))
    dag = dag_bag.dags["digits_retraining"]
    # One step of training is enough to be worse.
    dag.get_task("train").op_kwargs["epochs"] = 1

    outcome = run_dag(dag)

    assert outcome.state == "success", outcome.errors
    assert outcome.task_state("promote") == "skipped"
    assert json.loads((tmp_path / "digits" / "champion.json").read_text()) == reigning
