"""A mark of a task, or the end of its DAG run, ends the task's training where no process of Airflow follows it.

Such a task was deferred while no triggerer ran, or waited for its retry. A listener of the plugin: Airflow's API server
calls it for each mark of a user, of a task or of a DAG run, and the scheduler for each DAG run that has ended, also by
``dagrun_timeout``. A training that is followed is ended by its follower, and one whose store cannot be reached from
there by its lease.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from airflow.listeners import hookimpl

from airflow_rankzero.links import DIRECTORY_KEY
from rankzero import RunHandle
from rankzero.errors import RunNotFoundError

logger = logging.getLogger(__name__)

FOLLOWER_GRACE = 10.0
"""Seconds in which a follower has ended the training itself: it learns of the mark within a heartbeat or two."""

THREADS = 4
"""Threads for the marks of an API server. A mark of a task without a living training takes one for one query."""

_MARKED = ("failed", "success", "skipped")

_threads = ThreadPoolExecutor(THREADS, "rankzero-marks")


@hookimpl
def on_task_instance_failed(previous_state: Any, task_instance: Any) -> None:
    """Ends the training of a task that a user has marked as failed."""
    _note(previous_state, task_instance)


@hookimpl
def on_task_instance_success(previous_state: Any, task_instance: Any) -> None:
    """Ends the training of a task that a user has marked as succeeded."""
    _note(previous_state, task_instance)


@hookimpl
def on_task_instance_skipped(previous_state: Any, task_instance: Any) -> None:
    """Ends the training of a task that a user has marked as skipped."""
    _note(previous_state, task_instance)


@hookimpl
def on_dag_run_failed(dag_run: Any, msg: str) -> None:
    """Ends the trainings of a DAG run that has failed: by ``dagrun_timeout``, by its tasks, or by a user's mark."""
    _note_end(dag_run)


@hookimpl
def on_dag_run_success(dag_run: Any, msg: str) -> None:
    """Ends the trainings of a DAG run that a user has marked as successful."""
    _note_end(dag_run)


def _note_end(dag_run: Any) -> None:
    # The states of its tasks are not committed yet, and neither the scheduler nor a request waits.
    _threads.submit(_end_all, dag_run.dag_id, dag_run.run_id)


def _end_all(dag_id: str, run_id: str) -> None:
    """Ends the living trainings of a DAG run whose tasks have ended."""
    try:
        for task_id, map_index in _tasks_of(dag_id, run_id):
            _threads.submit(_end, dag_id, run_id, task_id, map_index)
    except Exception:
        logger.warning("the trainings of the DAG run %s are left to their leases", run_id, exc_info=True)


def _tasks_of(dag_id: str, run_id: str) -> list[tuple[str, int]]:
    """Returns the task instances of a DAG run that have had a training."""
    from airflow.models.xcom import XComModel
    from airflow.utils.session import create_session
    from sqlalchemy import select

    key = {"dag_id": dag_id, "run_id": run_id, "key": DIRECTORY_KEY}
    with create_session(scoped=False) as session:
        found = session.execute(select(XComModel.task_id, XComModel.map_index).filter_by(**key)).all()
    return [(task_id, map_index) for task_id, map_index in found]


def _note(previous_state: Any, ti: Any) -> None:
    # Task processes and the scheduler call listeners, too: with a state before, or with no row of the database.
    if previous_state is None and type(ti).__module__ == "airflow.models.taskinstance":
        # The mark is not committed yet, and the request does not wait.
        _threads.submit(_end, ti.dag_id, ti.run_id, ti.task_id, ti.map_index)


def _end(dag_id: str, run_id: str, task_id: str, map_index: int) -> None:
    """Ends the living training of a marked task instance, unless its follower does."""
    key = {"dag_id": dag_id, "run_id": run_id, "task_id": task_id, "map_index": map_index}
    directory = None
    try:
        directory = _directory_of(key)
        if directory is None:
            return
        handle = RunHandle.attach(directory, follows=False)
        if handle.wait(FOLLOWER_GRACE) or _state_of(key) not in _MARKED:
            return
        logger.info("the task %s of %s was marked or ended: ending its training in %s", task_id, run_id, directory)
        handle.cancel()
    except RunNotFoundError:
        # Each end of a DAG run comes here, also where the store is a disk of the workers.
        logger.info("the training of the task %s is not within reach, and is left to its lease: %s", task_id, directory)
    except Exception:
        logger.warning("the training of the marked task %s is left to its lease", task_id, exc_info=True)


def _directory_of(key: dict[str, Any]) -> str | None:
    from airflow.models.xcom import XComModel
    from airflow.utils.session import create_session
    from sqlalchemy import select

    with create_session(scoped=False) as session:
        found = session.scalars(select(XComModel.value).filter_by(**key, key=DIRECTORY_KEY)).first()
    return found if isinstance(found, str) else None


def _state_of(key: dict[str, Any]) -> str | None:
    from airflow.models.taskinstance import TaskInstance
    from airflow.utils.session import create_session
    from sqlalchemy import select

    with create_session(scoped=False) as session:
        state = session.scalars(select(TaskInstance.state).filter_by(**key)).first()
    return None if state is None else str(state)
