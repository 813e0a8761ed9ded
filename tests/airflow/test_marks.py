"""A user's mark ends a training that no process of Airflow follows, and no other one."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import until

from rankzero import Launcher

RunDag = Callable[..., Any]


def wait_long() -> None:
    time.sleep(120)


@pytest.mark.parametrize("mark", ["failed", "success"])
def test_a_mark_ends_a_training_that_nobody_follows(
    dag: Any, run_dag: RunDag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    from airflow.models.taskinstance import TaskInstance
    from airflow.sdk import task
    from airflow.utils.session import create_session
    from sqlalchemy import select

    from airflow_rankzero import marks
    from airflow_rankzero.plugin import RankZeroPlugin

    monkeypatch.setattr(marks, "FOLLOWER_GRACE", 0.1)
    handle = Launcher(1, store=tmp_path, run_id="left").submit(wait_long)
    until(lambda: handle.status().state == "running", 60, "the training")

    @task(task_id="train")
    def note(**context: Any) -> None:
        context["ti"].xcom_push(key="run_directory", value=handle.directory)

    note()
    outcome = run_dag(dag)
    listener = next(each for each in RankZeroPlugin.listeners if each is marks)

    def tell(state: str, previous: str | None) -> None:
        with create_session() as session:
            ti = session.scalars(select(TaskInstance).where(TaskInstance.run_id == outcome.run_id)).one()
            ti.state = state
            session.commit()
            getattr(listener, f"on_task_instance_{mark}")(previous_state=previous, task_instance=ti)
        marks._threads.submit(int).result(60)

    # A worker's report of a task's end, and a mark that was taken back by a clear.
    tell(mark, "running")
    tell("queued", None)
    assert not handle.status().final
    tell(mark, None)
    assert handle.wait(60)
    assert handle.status().state == "cancelled"
