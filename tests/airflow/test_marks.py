"""A user's mark ends a training that no process of Airflow follows, and no other one."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.conftest import until

from rankzero import Launcher

RunDag = Callable[..., Any]


def wait_long() -> None:
    time.sleep(120)


class Threads(ThreadPoolExecutor):
    """One thread, as the listeners have several."""

    is_exiting = False
    """Makes it those of an interpreter that exits, as after `airflow dags test`: they take nothing more."""

    def submit(self, call: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self.is_exiting and call.__name__ == "_end":
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        return super().submit(call, *args, **kwargs)


def marks_settle(monkeypatch: pytest.MonkeyPatch, threads: Threads | None = None) -> Callable[[], None]:
    """Gives the listeners one thread and no grace. Returns a wait for what they were called for."""
    from airflow_rankzero import marks

    monkeypatch.setattr(marks, "FOLLOWER_GRACE", 0.1)
    threads = threads or Threads(1)
    monkeypatch.setattr(marks, "_threads", threads)

    def settle() -> None:
        # Twice: the end of a DAG run submits one call for each task.
        for _ in range(2):
            threads.submit(int).result(60)

    return settle


@pytest.mark.parametrize("mark", ["failed", pytest.param("success", marks=pytest.mark.soak)])
def test_a_mark_ends_a_training_that_nobody_follows(
    dag: Any, run_dag: RunDag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    from airflow.models.taskinstance import TaskInstance
    from airflow.sdk import task
    from airflow.utils.session import create_session
    from sqlalchemy import select

    from airflow_rankzero import RankZeroPlugin, marks

    settle = marks_settle(monkeypatch)

    @task(task_id="train")
    def note(**context: Any) -> None:
        context["ti"].xcom_push(key="run_directory", value=str(tmp_path / "left"))

    note()
    outcome = run_dag(dag)
    settle()
    # After the end of the DAG run, which would end the training, too.
    handle = Launcher(1, store=tmp_path, run_id="left").submit(wait_long)
    until(lambda: handle.status().state == "running", 60, "the training")
    listener = next(each for each in RankZeroPlugin.listeners if each is marks)

    def tell(state: str, previous: str | None) -> None:
        with create_session() as session:
            ti = session.scalars(select(TaskInstance).where(TaskInstance.run_id == outcome.run_id)).one()
            ti.state = state
            session.commit()
            getattr(listener, f"on_task_instance_{mark}")(previous_state=previous, task_instance=ti)
        settle()

    # A worker's report of a task's end, and a mark that was taken back by a clear.
    tell(mark, "running")
    tell("queued", None)
    assert not handle.status().final
    tell(mark, None)
    assert handle.wait(60)
    assert handle.status().state == "cancelled"


def test_a_mark_ends_no_run_that_was_submitted_after_it(
    dag: Any, run_dag: RunDag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.models.taskinstance import TaskInstance
    from airflow.sdk import task
    from airflow.utils.session import create_session
    from sqlalchemy import select

    from airflow_rankzero import marks

    settle = marks_settle(monkeypatch)

    @task(task_id="train")
    def note(**context: Any) -> None:
        context["ti"].xcom_push(key="run_directory", value=str(tmp_path / "left"))

    note()
    outcome = run_dag(dag)
    settle()
    launcher = Launcher(1, store=tmp_path, run_id="left")
    before = launcher.submit(wait_long)
    until(lambda: before.status().state == "running", 60, "the training")
    rows = marks._rows

    def submit_again(model: str, *columns: str, **key: Any) -> Any:
        found = rows(model, *columns, **key)
        if "state" in columns:
            before.cancel()
            assert before.wait(60)
            launcher.submit(wait_long)
        return found

    monkeypatch.setattr(marks, "_rows", submit_again)
    with create_session() as session:
        ti = session.scalars(select(TaskInstance).where(TaskInstance.run_id == outcome.run_id)).one()
        ti.state = "failed"
        session.commit()
        marks.on_task_instance_failed(previous_state=None, task_instance=ti)
    settle()
    after = launcher.find()
    assert after
    assert after.submission == 1
    try:
        until(lambda: after.status().state == "running", 60, "the next training")
    finally:
        after.cancel()
        assert after.wait(60)


@pytest.mark.parametrize(
    ("end", "is_exiting"),
    [("failed", False), ("failed", True), pytest.param("success", False, marks=pytest.mark.soak)],
)
def test_the_end_of_a_dag_run_ends_a_training_that_nobody_follows(
    dag: Any, run_dag: RunDag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, is_exiting: bool
) -> None:
    from airflow.models.dagrun import DagRun
    from airflow.models.taskinstance import TaskInstance
    from airflow.sdk import task
    from airflow.utils.session import create_session
    from sqlalchemy import select

    from airflow_rankzero.tries import TaskTry

    threads = Threads(1)
    settle = marks_settle(monkeypatch, threads)

    followers: list[TaskTry] = []

    @task(task_id="train")
    def note(**context: Any) -> None:
        context["ti"].xcom_push(key="run_directory", value=str(tmp_path / "left"))
        followers.append(TaskTry(context["ti"]))

    note()
    outcome = run_dag(dag)
    settle()
    # After the end of the DAG run, which would end the training, too.
    handle = Launcher(1, store=tmp_path, run_id="left").submit(wait_long)
    until(lambda: handle.status().state == "running", 60, "the training")

    def tell(of_task: str) -> None:
        with create_session() as session:
            ti = session.scalars(select(TaskInstance).where(TaskInstance.run_id == outcome.run_id)).one()
            ti.state = of_task
            dag_run = session.scalars(select(DagRun).where(DagRun.run_id == outcome.run_id)).one()
            dag_run.set_state(end)
            session.commit()
            # As the scheduler does, with the listeners of the installed plugin.
            dag_run.notify_dagrun_state_changed(msg="timed_out")
        settle()

    # Another task has ended the DAG run, and a user has cleared this one.
    tell("queued")
    assert not handle.status().final
    threads.is_exiting = is_exiting
    # By `dagrun_timeout`, of a task that waited for its retry.
    tell("skipped")
    assert handle.wait(60)
    assert handle.status().state == "cancelled"
    assert "on request: Airflow has set the task to skipped" in str(handle.status().error)
    # A try after a clear, which has begun to follow the run meanwhile, submits it again.
    (follower,) = followers
    assert handle.cancelled_for() == follower.receiver
    assert not follower.is_replaced(handle)
    assert TaskTry(SimpleNamespace(id="cleared", try_number=2)).is_replaced(handle)


@pytest.mark.parametrize("path", ["", "/dagRuns/{run_id}", "/dagRuns/{run_id}/taskInstances/train"])
def test_a_deletion_ends_a_training_that_nobody_follows(
    dag: Any, run_dag: RunDag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    from airflow.models.dagrun import DagRun
    from airflow.sdk import task
    from airflow.utils.session import create_session
    from sqlalchemy import delete

    from airflow_rankzero import RankZeroPlugin

    settle = marks_settle(monkeypatch)

    @task(task_id="train")
    def note(**context: Any) -> None:
        context["ti"].xcom_push(key="run_directory", value=str(tmp_path / "left"))

    note()
    outcome = run_dag(dag)
    settle()
    handle = Launcher(1, store=tmp_path, run_id="left").submit(wait_long)
    until(lambda: handle.status().state == "running", 60, "the training")
    statuses = iter([409, 204])

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        if (status := next(statuses)) == 204:
            with create_session() as session:
                session.execute(delete(DagRun).where(DagRun.run_id == outcome.run_id))
        await send({"type": "http.response.start", "status": status})

    async def send(message: Any) -> None:
        pass

    (middleware,) = (each["middleware"] for each in RankZeroPlugin.fastapi_root_middlewares)
    scope = {
        "type": "http",
        "method": "DELETE",
        "path": f"/api/v2/dags/{dag.dag_id}{path.format(run_id=outcome.run_id)}",
    }
    asyncio.run(middleware(serve)(scope, None, send))
    settle()
    assert not handle.status().final, "Airflow has refused the deletion"
    asyncio.run(middleware(serve)(scope, None, send))
    settle()
    assert handle.wait(60)
    assert "on request: Airflow has deleted the task" in str(handle.status().error)


def test_the_followers_of_many_trainings_have_one_grace_together(monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow_rankzero import marks

    waits: list[float] = []
    ended: list[str] = []
    now = [0.0]

    class Unfollowed:
        def __init__(self, directory: str) -> None:
            self.directory = directory

        def wait(self, timeout: float) -> bool:
            waits.append(timeout)
            now[0] += timeout
            return False

        def cancel(self, receiver: dict[str, Any], reason: str) -> None:
            ended.append(self.directory)

    def rows(_: str, *columns: str, **key: Any) -> list[Any]:
        if "state" in columns:
            return [SimpleNamespace(state="failed", id="1", try_number=1)]
        return [SimpleNamespace(dag_id="dag", run_id="run", task_id="train", map_index=index) for index in range(5)]

    settle = marks_settle(monkeypatch)
    monkeypatch.setattr(marks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(marks, "_rows", rows)
    monkeypatch.setattr(marks, "_value_of", lambda row: str(row.map_index))
    monkeypatch.setattr(marks.RunHandle, "attach", lambda directory, follows: Unfollowed(directory))
    marks._threads.submit(marks._end_all, dag_id="dag", run_id="run")
    settle()
    assert ended == ["0", "1", "2", "3", "4"]
    assert sum(waits) <= marks.FOLLOWER_GRACE
