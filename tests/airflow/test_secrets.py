"""Secrets of a task are shown neither in its rendered fields nor in its log nor its trigger's; ranks look none up."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.airflow import versions
from tests.airflow.versions import RunDag

TOKEN = "token-of-the-test-8261"
STORE_KEY = "key-of-the-store-7350"
CONNECTION_KEY = "key-of-the-connection-9142"


def show(texts: list[str]) -> None:
    print("given", *texts, os.environ["HF_TOKEN"], flush=True)


def rendered_fields(dag_id: str) -> dict[str, Any]:
    from airflow.models.renderedtifields import RenderedTaskInstanceFields
    from airflow.utils.session import create_session

    with create_session() as session:
        (row,) = session.query(RenderedTaskInstanceFields).filter_by(dag_id=dag_id).all()
        return dict(row.rendered_fields)


@pytest.mark.parametrize(
    ("field", "template"),
    [
        ("master", "sc://host:15002/;token={{ params.token }}"),
        ("store", "s3://me:{{ params.token }}@host/runs"),
        ("dataset", "https://me:{{ params.token }}@host/rows.parquet"),
        ("dataset", {"tokens": "abfs://c@a.dfs.core.windows.net/rows?sv=1&sig={{ params.token }}"}),
    ],
)
def test_the_credentials_of_addresses_are_masked_as_they_are_rendered(
    dag: Any, monkeypatch: pytest.MonkeyPatch, field: str, template: Any
) -> None:
    from airflow_rankzero import TorchDistributorOperator, _compat

    masked: list[str] = []
    monkeypatch.setattr(_compat, "mask_secret", masked.append)
    token = f"{TOKEN}-{field}"
    task = TorchDistributorOperator(task_id="train", train=show, **{field: template})
    task.render_template_fields({"dag": dag, "params": {"token": token}})
    assert masked == [token]


@pytest.mark.parametrize("mapped", [False, True])
def test_they_are_masked_before_the_fields_are_stored(
    dag: Any,
    run_dag: RunDag,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    mapped: bool,
) -> None:
    from airflow_rankzero import TorchDistributorOperator

    token, key = f"{TOKEN}-{mapped}", f"{STORE_KEY}-{mapped}"
    monkeypatch.setenv("AIRFLOW_VAR_PLAIN", token)
    dag.params["store"] = {"id": key}
    arguments: dict[str, Any] = {
        "task_id": "train",
        "train": show,
        # Under names of no suspicion, too, and in a text around it.
        "op_args": [["{{ params.store.id }}", "with {{ params.store.id }} in it"]],
        "env": {"HF_TOKEN": "{{ params.token }}"},
        "spark_conf": {"spark.hadoop.fs.azure.account.key.x": "{{ params.store.id }}"},
        "conn_id": "here",
        "store": str(tmp_path),
    }
    dag.params["token"] = token
    if mapped:
        TorchDistributorOperator.partial(**arguments).expand(num_processes=[1])
    else:
        TorchDistributorOperator(num_processes=1, **arguments)
    outcome = run_dag(dag)
    assert outcome.state == "success", outcome.errors
    fields = rendered_fields(dag.dag_id)
    assert fields["env"] == {"HF_TOKEN": "***"}
    assert fields["spark_conf"] == {"spark.hadoop.fs.azure.account.key.x": "***"}
    assert token not in json.dumps(fields)
    assert key not in json.dumps(fields)
    (line,) = (line for line in capfd.readouterr().out.splitlines() if "[0] given" in line)
    # The supervisor of a real task does it.
    assert "[0] given *** with *** in it ***" in versions.secrets_masker().redact(line)


def test_the_trigger_masks_what_the_worker_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process that has never seen the task: what it registers is what Airflow replaces."""
    from airflow_rankzero.triggers import RunTrigger
    from rankzero import Launcher

    extra = {"engine": "local", "conf": {"spark.hadoop.fs.s3a.secret.key": CONNECTION_KEY}}
    monkeypatch.setenv("AIRFLOW_CONN_WITH_KEY", json.dumps({"conn_type": "rankzero", "extra": extra}))
    token = f"{TOKEN}-trigger"
    handle = Launcher(1, store=tmp_path, env={"HF_TOKEN": token}).submit(show, [CONNECTION_KEY])
    trigger = RunTrigger(handle.directory, handle.job.nonce, conn_id="with_key")
    trigger = RunTrigger(**trigger.serialize()[1])

    versions.secrets_masker().reset_secrets_masker()

    async def follow() -> None:
        async for _ in trigger.run():
            pass

    asyncio.run(asyncio.wait_for(follow(), 120))
    (line,) = handle.logs(rank=0)
    # Of the run's own secrets nothing is in any file; the connection's are masked by this process.
    assert line == f"given {CONNECTION_KEY} ***"
    assert versions.secrets_masker().redact(line) == "given *** ***"
    assert token not in json.dumps(trigger.serialize())


# -- ranks look none up -------------------------------------------------------------------------


def of_variable() -> Any:
    from airflow.sdk import Variable

    return Variable.get("x", default="d")


def of_connection() -> Any:
    from airflow.sdk import BaseHook

    return BaseHook.get_connection("here").conn_type


def of_old_names() -> Any:
    from airflow.models import Variable

    return Variable.get("x", default_var="d")


@pytest.mark.parametrize(
    ("look_up", "template"),
    # An `ObjectStoragePath` with a connection asks for it like its hooks.
    [(of_variable, "var.value.x"), (of_connection, "conn.here.password"), (of_old_names, "var.value.x")],
)
def test_a_look_up_in_a_rank_is_one_typed_error(
    dag: Any, run_dag: RunDag, look_up: Callable[[], Any], template: str, operator: Any
) -> None:
    operator(look_up)
    error = run_dag(dag).errors["train"]
    assert error.exception_type == "airflow_rankzero.provider_info.LookupInRankError"
    assert "was looked up in a rank" in str(error)
    assert f'"{{{{ {template} }}}}"' in str(error)


def seen() -> list[Any]:
    from airflow.sdk import ObjectStoragePath

    values = [value for name, value in os.environ.items() if name.endswith("SQL_ALCHEMY_CONN")]
    return [sorted(set(values)), ObjectStoragePath("file:///tmp").exists(), os.environ["OWN"]]


def test_a_rank_has_no_database_of_airflow_and_what_needs_none_works(dag: Any, run_dag: RunDag, operator: Any) -> None:
    operator(seen, env={"OWN": "1"})
    outcome = run_dag(dag)
    assert outcome.xcom("train") == [["ranks-have-no-database-of-airflow://"], True, "1"], outcome.errors
