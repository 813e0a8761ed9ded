"""What an alias among a task's outlets becomes: an asset that is the result."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.airflow import versions
from tests.airflow.versions import RunDag


def events_of(dag_id: str) -> list[tuple[str, list[str], dict[str, Any]]]:
    """URI of the asset, names of the aliases and extra of each event."""
    from airflow.models.asset import AssetEvent
    from airflow.utils.session import create_session

    with create_session() as session:
        events = session.query(AssetEvent).filter(AssetEvent.source_dag_id == dag_id).all()
        return [
            (event.asset.uri, [alias.name for alias in event.source_aliases], dict(event.extra)) for event in events
        ]


def test_an_alias_gets_the_result_as_its_asset(
    dag: Any, run_dag: RunDag, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from airflow.sdk import AssetAlias

    from airflow_rankzero import torch_distributor

    @torch_distributor(num_processes=1, store=str(tmp_path), conn_id="here", outlets=[AssetAlias("models")])
    def train() -> dict[str, Any]:
        import torch

        import rankzero.train as rt

        for step in range(3):
            rt.report({"step": step, "loss": 1.5 - step / 2})
        return {"weights": torch.ones(2)}

    train()
    outcome = run_dag(dag)
    ref = outcome.xcom("train")
    ((uri, aliases, extra),) = events_of(dag.dag_id)
    assert (uri, aliases) == (ref.uri, ["models"])
    (directory,) = tmp_path.iterdir()
    assert extra["run_directory"] == str(directory)
    assert extra["run_id"] == directory.name
    assert extra["sha256"] == ref.sha256
    nested = extra["metrics"] if versions.version() >= (3, 1, 4) else json.loads(extra["metrics"])
    assert nested == {"loss": 0.5, "step": 2}
    assert extra["steps_per_second"] > 0
    log = capfd.readouterr().out
    assert "::group::Result" in log
    assert "metrics: {'step': 2, 'loss': 0.5}" in log


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


def test_an_asset_that_the_user_gave_the_alias_gets_the_facts(dag: Any, run_dag: RunDag, operator: Any) -> None:
    from airflow.sdk import Asset, AssetAlias

    def name_it(context: Any) -> None:
        context["outlet_events"][AssetAlias("models")].add(Asset("s3://bucket/model"), extra={"stage": "test"})

    def train() -> float:
        return 0.5

    operator(train, outlets=[AssetAlias("models")], pre_execute=name_it)
    outcome = run_dag(dag)
    assert outcome.state == "success", outcome.errors
    ((uri, aliases, extra),) = events_of(dag.dag_id)
    assert (uri, aliases) == ("s3://bucket/model", ["models"])
    assert (extra["stage"], extra["format"]) == ("test", "json")


def test_a_result_that_cannot_be_an_asset_fails_no_training(caplog: pytest.LogCaptureFixture) -> None:
    from airflow.sdk import AssetAlias
    from airflow.sdk.execution_time.context import OutletEventAccessors

    from airflow_rankzero.xcom import fill_outlets

    alias = AssetAlias("models")
    context: Any = {"outlets": [alias], "outlet_events": OutletEventAccessors()}
    fill_outlets(context, {"uri": "/" + "x" * 1500})
    assert "cannot be an asset of the alias 'models'" in caplog.text
    assert context["outlet_events"][alias].asset_alias_events == []


def test_metrics_of_any_name_and_size_fail_no_task(
    dag: Any, run_dag: RunDag, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from airflow.sdk import Asset

    from airflow_rankzero import torch_distributor

    @torch_distributor(num_processes=1, store=str(tmp_path), conn_id="here", outlets=[Asset("s3://bucket/model")])
    def train() -> int:
        import rankzero.train as rt

        for sign in (1, -1):
            rt.report({"loss": sign * 1.7e308, "step": -sign * 2**1023, "loss\udcff": float(sign), "note": "\0\udce9"})
        return 1

    train()
    outcome = run_dag(dag)
    assert outcome.xcom("train") == 1, outcome.errors
    ((_, _, extra),) = events_of(dag.dag_id)
    assert (extra["metrics"]["loss"], extra["metrics"]["loss\\udcff"]) == ("-1.7e+308", -1.0)
    assert "::group::Result" in capfd.readouterr().out


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
