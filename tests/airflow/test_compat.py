"""Everything private that the package uses of Airflow, which has to be there in each supported version."""

from pathlib import Path
from typing import Any

import pytest
from tests.airflow import versions
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


def test_a_row_of_the_database_gives_the_xcom_that_a_task_has_pushed(dag: Any, run_dag: RunDag) -> None:
    from airflow.sdk import task
    from airflow.utils.session import create_session
    from sqlalchemy import select

    from airflow_rankzero import _compat

    @task
    def push(**context: Any) -> None:
        context["ti"].xcom_push(key="run_directory", value="/runs/a")

    push()
    run_dag(dag)
    xcom = _compat.model("xcom.XComModel")
    with create_session(scoped=False) as session:
        found = select(xcom.value).where(xcom.dag_id == dag.dag_id, xcom.key == "run_directory")
        (row,) = session.execute(found).all()
    assert _compat.read_xcom(row) == "/runs/a"


def test_the_states_of_tasks_can_be_queried_without_one() -> None:
    import inspect

    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    given = {"dag_id": "d", "task_ids": ["t"], "run_ids": ["r"], "map_index": 0}
    assert inspect.signature(RuntimeTaskInstance.get_task_states).bind(**given)


def test_a_class_of_ours_comes_back_from_xcom_only_if_it_was_allowed() -> None:
    from airflow_rankzero import _compat

    class Ours:
        __version__ = 1

        def serialize(self) -> dict[str, int]:
            return {}

        @staticmethod
        def deserialize(data: dict[str, int], version: int) -> "Ours":
            return Ours()

    Ours.__qualname__ = "Ours"
    globals()["Ours"] = Ours
    encoded = {"__classname__": f"{__name__}.Ours", "__version__": 1, "__data__": {}}
    with pytest.raises(ImportError, match="not found in allow list"):
        versions.deserialize(encoded)
    _compat.allow_class(Ours)
    assert isinstance(versions.deserialize(encoded), Ours)


def test_a_secret_is_masked_from_now_on(tmp_path: Path) -> None:
    from airflow_rankzero import _compat

    _compat.mask_secret("of-the-test-of-compat")
    assert versions.secrets_masker().redact("it is of-the-test-of-compat") == "it is ***"
