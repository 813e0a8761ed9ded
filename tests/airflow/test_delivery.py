"""A result is acknowledged when Airflow has it, and not before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankzero import RunHandle

RunDag = Callable[..., Any]


def train() -> int:
    return 7


@pytest.fixture
def run_of(tmp_path: Path) -> Callable[[], RunHandle[Any]]:
    def find() -> RunHandle[Any]:
        (job,) = tmp_path.glob("*/job.json")
        return RunHandle.attach(job.parent)

    return find


def test_the_listener_acknowledges_what_airflow_has_stored(
    dag: Any, run_dag: RunDag, tmp_path: Path, run_of: Callable[[], RunHandle[Any]]
) -> None:
    from airflow_rankzero import TorchDistributorOperator

    TorchDistributorOperator(task_id="train", train=train, num_processes=1, conn_id="here", store=str(tmp_path))
    assert run_dag(dag).state == "success"
    delivery = run_of().delivery()
    assert delivery.acknowledged
    assert delivery.receiver["try"] == 1


def test_each_operator_that_a_task_executes_has_a_run_which_is_acknowledged(
    dag: Any, run_dag: RunDag, tmp_path: Path
) -> None:
    from airflow.sdk import task

    from airflow_rankzero import TorchDistributorOperator

    @task
    def both(**context: Any) -> list[int]:
        return [
            TorchDistributorOperator(
                task_id=name, train=train, num_processes=1, conn_id="here", store=str(tmp_path)
            ).execute(context)
            for name in ("first", "second")
        ]

    both()
    outcome = run_dag(dag)
    assert outcome.xcom("both") == [7, 7], outcome.errors
    handles = [RunHandle.attach(job.parent) for job in sorted(tmp_path.glob("*/job.json"))]
    assert [handle.id.split("__")[-1].rpartition("-")[0] for handle in handles] == ["both.first", "both.second"]
    assert all(handle.delivery().acknowledged for handle in handles)


def test_a_result_that_airflow_could_not_store_waits(
    dag: Any, run_dag: RunDag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_of: Callable[[], RunHandle[Any]]
) -> None:
    from airflow.sdk.execution_time import task_runner

    from airflow_rankzero import TorchDistributorOperator

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("the XCom backend is away")

    monkeypatch.setattr(task_runner, "_push_xcom_if_needed", fail)
    TorchDistributorOperator(task_id="train", train=train, num_processes=1, conn_id="here", store=str(tmp_path))
    assert run_dag(dag).state == "failed"
    handle = run_of()
    assert handle.status().state == "succeeded"
    assert not handle.delivery().acknowledged


def test_a_success_that_airflow_s_server_refused_is_not_acknowledged(
    dag: Any, run_dag: RunDag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_of: Callable[[], RunHandle[Any]]
) -> None:
    """Airflow calls the listener all the same: the next try must get the result."""
    from airflow.sdk.api import client

    from airflow_rankzero import TorchDistributorOperator

    asked = []

    def refuse(*args: Any, **kwargs: Any) -> None:
        asked.append(args)
        raise OSError("503")

    monkeypatch.setattr(client.TaskInstanceOperations, "succeed", refuse)
    TorchDistributorOperator(task_id="train", train=train, num_processes=1, conn_id="here", store=str(tmp_path))
    run_dag(dag)
    assert asked
    handle = run_of()
    assert handle.delivery().receiver["try"] == 1
    assert not handle.delivery().acknowledged
