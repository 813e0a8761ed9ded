"""A result is acknowledged when Airflow has it; a training whose task has ended ends, and no other one."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.airflow.conftest import Watched
from tests.airflow.versions import RunDag
from tests.conftest import find, until

from rankzero import RunHandle


def train() -> int:
    return 7


def test_each_operator_that_a_task_executes_has_a_run_which_is_acknowledged(
    dag: Any, run_dag: RunDag, tmp_path: Path, operator: Any
) -> None:
    from airflow.sdk import task

    @task
    def both(**context: Any) -> list[int]:
        return [operator(train, task_id=name).execute(context) for name in ("first", "second")]

    both()
    outcome = run_dag(dag)
    assert outcome.xcom("both") == [7, 7], outcome.errors
    handles = [RunHandle.attach(job.parents[1]) for job in sorted(tmp_path.glob("*/submissions/0.json"))]
    assert [handle.id.split("__")[-1].rpartition("-")[0] for handle in handles] == ["both.first", "both.second"]
    assert all(handle.delivery().acknowledged for handle in handles)


def test_a_success_that_airflow_s_server_refused_is_not_acknowledged(
    dag: Any, run_dag: RunDag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operator: Any
) -> None:
    """Airflow calls the listener all the same: the next try must get the result."""
    from airflow.sdk.api import client

    asked = []

    def refuse(*args: Any, **kwargs: Any) -> None:
        asked.append(args)
        raise OSError("503")

    monkeypatch.setattr(client.TaskInstanceOperations, "succeed", refuse)
    operator(train)
    run_dag(dag)
    assert asked
    (job,) = tmp_path.glob("*/submissions/0.json")
    delivery = RunHandle.attach(job.parents[1]).delivery()
    assert delivery.receiver["try"] == 1
    assert not delivery.acknowledged


# -- trainings whose task has ended ------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda watched: watched.set_state("failed"), "Airflow has set the task to failed"),
        # By `dagrun_timeout`.
        (lambda watched: watched.set_state("skipped"), "Airflow has set the task to skipped"),
        (Watched.delete_run, "Airflow has deleted the task"),
        (Watched.delete_dag, "Airflow has deleted the task"),
    ],
)
def test_the_end_of_a_task_ends_a_training_that_nobody_follows(
    watched: Watched, end: Callable[[Watched], None], reason: str
) -> None:
    from airflow_rankzero.tries import TaskTry

    watched.poll()
    assert not watched.handle.status().final
    end(watched)
    watched.poll()
    assert watched.handle.wait(60)
    assert watched.handle.status().state == "cancelled"
    assert f"on request: {reason}" in str(watched.handle.status().error)
    # Another try, after a clear or of a new DAG run of the same name, may have begun to follow the run: it submits it.
    assert TaskTry(SimpleNamespace(id="cleared", try_number=2)).is_replaced(watched.handle)


@pytest.mark.parametrize("state", [None, "queued"])
def test_a_cleared_task_keeps_its_training(watched: Watched, state: str | None) -> None:
    watched.set_state(state)
    watched.poll()
    assert watched.handle.cancelled_for() == {}
    assert not watched.handle.status().final


def test_a_mark_ends_no_run_that_was_submitted_after_it(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow_rankzero import _compat

    rows = _compat.rows

    def submit_again(columns: list[Any], *conditions: Any) -> Any:
        found = rows(columns, *conditions)
        # The query for the state of the task, right before the end.
        if columns[0].key == "state":
            watched.handle.cancel()
            assert watched.handle.wait(60)
            watched.launcher.submit(time.sleep, 120)
        return found

    monkeypatch.setattr(_compat, "rows", submit_again)
    watched.set_state("failed")
    watched.poll()
    after = find(watched.launcher)
    assert after
    assert after.job.submission == 1
    until(lambda: after.status().state == "running", 60, "the next training")
    assert after.cancelled_for() == {}


def test_only_a_scheduler_watches_and_a_failure_is_only_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow_rankzero import listeners

    ended, polls = threading.Event(), iter([OSError("no database"), ["row"]])

    class Enough(BaseException):
        pass

    def poll(watch: Any) -> list[str]:
        found = next(polls, Enough())
        if isinstance(found, BaseException):
            raise found
        return found

    monkeypatch.setattr(listeners.Watch, "poll", poll)
    monkeypatch.setattr(listeners, "end", lambda row: ended.set())
    listeners._watch(SimpleNamespace(job_type="TriggererJob"), 0.01)
    with pytest.raises(Enough):
        listeners._watch(SimpleNamespace(job_type="SchedulerJob"), 0.01)
    assert ended.wait(60)


def test_a_task_that_is_scheduled_again_within_the_grace_keeps_its_training(
    watched: Watched,
) -> None:
    watched.watch.grace = 600.0
    watched.set_state("failed")
    watched.poll()
    watched.set_state("queued")
    watched.poll()
    watched.watch.grace = 0.0
    watched.poll()
    assert not watched.handle.status().final
