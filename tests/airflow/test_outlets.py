"""What the events of a task's assets say about its result."""

from pathlib import Path
from typing import Any

import pytest
from tests.airflow import versions
from tests.airflow.versions import RunDag


def extra_of(dag_id: str) -> dict[str, Any]:
    """The extra of the only event."""
    from airflow.models.asset import AssetEvent
    from airflow.utils.session import create_session

    with create_session() as session:
        return dict(session.query(AssetEvent).filter(AssetEvent.source_dag_id == dag_id).one().extra)


def test_the_partition_of_a_dag_run_reaches_the_ranks_and_the_event_of_the_asset(
    dag: Any, run_dag: RunDag, operator: Any
) -> None:
    versions.needs(3, 2, "partitions of DAG runs")
    from airflow.models.asset import AssetEvent
    from airflow.models.dagrun import DagRun
    from airflow.sdk import Asset
    from airflow.utils.session import create_session
    from sqlalchemy import select, update

    def give_partition(context: Any) -> None:
        # As a run that an asset of another partitioned DAG has triggered has it.
        with create_session(scoped=False) as session:
            session.execute(update(DagRun).where(DagRun.run_id == context["run_id"]).values(partition_key="2026-01-01"))
        context["partition_key"] = "2026-01-01"

    def train() -> str:
        import rankzero.train as rt

        return rt.get_context().labels["partition_key"]

    operator(train, outlets=[Asset("s3://bucket/partitioned")], pre_execute=give_partition)
    outcome = run_dag(dag)
    assert outcome.xcom("train") == "2026-01-01", outcome.errors
    with create_session() as session:
        keys = session.scalars(select(AssetEvent.partition_key).where(AssetEvent.source_dag_id == dag.dag_id)).all()
    assert keys == ["2026-01-01"]


def test_the_event_of_an_asset_has_the_facts_beside_what_the_user_wrote(
    dag: Any, run_dag: RunDag, tmp_path: Path, capfd: pytest.CaptureFixture[str], operator: Any
) -> None:
    from airflow.sdk import Asset

    def note(context: Any) -> None:
        context["outlet_events"][Asset("s3://bucket/model")].extra = {"stage": "test", "format": "mine"}

    def train() -> dict[str, Any]:
        import torch

        import rankzero.train as rt

        for step in range(3):
            rt.report({"step": step, "loss": 1.5 - step / 2, "bad\udcff": -1.7e308, "note": "\0\udce9"})
        return {"weights": torch.ones(2)}

    operator(train, outlets=[Asset("s3://bucket/model")], pre_execute=note)
    ref, extra = run_dag(dag).xcom("train"), extra_of(dag.dag_id)
    (directory,) = tmp_path.iterdir()
    assert (extra["stage"], extra["format"], extra["uri"]) == ("test", "mine", ref.uri)
    assert (extra["run_directory"], extra["run_id"]) == (str(directory), directory.name)
    assert (extra["sha256"], extra["metrics"]["loss"], extra["metrics"]["step"]) == (
        ref.digest.removeprefix("sha256:"),
        0.5,
        2,
    )
    # Airflow's API server would refuse these, and with them the success of the task.
    assert extra["metrics"]["bad\\udcff"] == "-1.7e+308"
    assert extra["steps_per_second"] > 0
    log = capfd.readouterr().out
    assert "::group::Result" in log
    assert "metrics: {'step': 2, 'loss': 0.5" in log


@pytest.mark.parametrize("broken", ["describe", "fill_outlets", "offer"])
def test_what_cannot_be_recorded_fails_no_task(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import logging
    from types import SimpleNamespace

    from airflow_rankzero.xcom import record
    from rankzero import Launcher

    def fail(*_args: object) -> None:
        raise RuntimeError("no record \udcff")

    handle = Launcher(1, store=tmp_path).submit(len, "abc")
    assert handle.result() == 3
    monkeypatch.setattr(f"airflow_rankzero.xcom.{broken}", fail)
    task = SimpleNamespace(log=logging.getLogger("task"))
    ti = SimpleNamespace(id="1", try_number=1, task=task)
    context: Any = {"outlets": [], "ti": ti}
    caplog.set_level(logging.INFO)
    uri = record(task, context, handle)
    assert uri == (None if broken == "describe" else handle.result_ref().uri)
    warnings = [found.getMessage() for found in caplog.records if found.levelname == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].endswith("does not affect the training: RuntimeError: no record \\udcff")
