"""The nightly example pipeline as a whole, with the deployment that follows it, as their DAG file defines them."""

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
    from tests.airflow.conftest import register

    file = EXAMPLES / "airflow" / "digits_retraining.py"
    bag = BundleDagBag(dag_folder=file, bundle_path=EXAMPLES, bundle_name="dags-folder")
    for dag in bag.dags.values():
        register(dag)
    return bag


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
    dag_bag: Any, run_dag: Callable[..., Any], tmp_path: Path
) -> None:
    assert dag_bag.import_errors == {}
    assert set(dag_bag.dags) == {"digits_retraining", "digits_deployment"}
    dag = dag_bag.dags["digits_retraining"]
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

    deployment = run_dag(dag_bag.dags["digits_deployment"])
    assert deployment.state == "success", deployment.errors
    manifest = json.loads((tmp_path / "digits" / "manifest.json").read_text())
    assert manifest == {**champion, "input": [1, 8, 8], "classes": 10}


def test_nothing_is_deployed_that_was_changed_after_its_promotion(
    dag_bag: Any, run_dag: Callable[..., Any], tmp_path: Path
) -> None:
    import digits

    from rankzero import ResultError, ResultRef

    ref = ResultRef.save(digits.build_model().state_dict(), tmp_path / "models")
    digits.promote(0.9, ref.to_json())
    data = bytearray(Path(ref.uri).read_bytes())
    data[-1] ^= 1
    Path(ref.uri).write_bytes(data)
    dag = dag_bag.dags["digits_deployment"]
    dag.get_task("deploy").retries = 0
    outcome = run_dag(dag)
    assert isinstance(outcome.errors["deploy"], ResultError)
    assert not (tmp_path / "digits" / "manifest.json").exists()


def test_worse_model_is_not_promoted(dag_bag: Any, run_dag: Callable[..., Any], tmp_path: Path) -> None:
    dag_bag.dags["digits_retraining"].get_task("train").conn_id = "here"
    reigning = {"accuracy": 1.1, "model": {}}
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "champion.json").write_text(json.dumps(reigning))
    dag = dag_bag.dags["digits_retraining"]
    # One step of training is enough to be worse.
    dag.get_task("train").op_kwargs["epochs"] = 1

    outcome = run_dag(dag)

    assert outcome.state == "success", outcome.errors
    assert outcome.task_state("promote") == "skipped"
    assert promotions(outcome.run_id) == []
    assert json.loads((tmp_path / "digits" / "champion.json").read_text()) == reigning
