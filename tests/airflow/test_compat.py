"""Private parts of Airflow, in each supported version; `test_provider` and `test_listeners` reach those of XComs."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.airflow.versions import RunDag


def test_a_task_knows_whether_a_worker_runs_it(dag: Any, run_dag: RunDag) -> None:
    from airflow.sdk import task

    from airflow_rankzero import _compat

    @task
    def where() -> bool:
        return _compat.is_in_process()

    where()
    assert run_dag(dag).xcom("where") is True
    assert _compat.is_in_process() is False


def test_the_states_of_tasks_can_be_queried_without_one() -> None:
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    given = {"dag_id": "d", "task_ids": ["t"], "run_ids": ["r"], "map_index": 0}
    assert inspect.signature(RuntimeTaskInstance.get_task_states).bind(**given)


@pytest.mark.parametrize("dag_id", ["d", None])
def test_airflow_is_asked_whether_a_user_may_read_the_logs_of_a_dag(
    airflow_home: Path, monkeypatch: pytest.MonkeyPatch, dag_id: str | None
) -> None:
    from airflow.api_fastapi import app
    from airflow.api_fastapi.auth.managers.base_auth_manager import BaseAuthManager

    from airflow_rankzero import _compat

    def is_authorized_dag(**given: Any) -> bool:
        assert inspect.signature(BaseAuthManager.is_authorized_dag).bind(None, **given)
        return bool(given["user"] == "me" and given["details"].id == dag_id)

    monkeypatch.setattr(app, "get_auth_manager", lambda: SimpleNamespace(is_authorized_dag=is_authorized_dag))
    assert _compat.may_read_logs("me", dag_id)
    assert not _compat.may_read_logs("another", dag_id)
    assert callable(_compat.user_of_request())
