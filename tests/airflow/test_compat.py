"""Private parts of Airflow, in each supported version; `test_provider` and `test_listeners` reach those of XComs."""

import inspect
from typing import Any

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
