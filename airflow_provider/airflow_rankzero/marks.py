"""A mark of a task, or the end of its DAG run, ends the task's training where no process of Airflow follows it.

Such a task was deferred while no triggerer ran, or waited for its retry. A listener of the plugin: Airflow's API server
calls it for each mark of a user, of a task or of a DAG run, and the scheduler for each DAG run that has ended, also by
``dagrun_timeout``. A training that is followed is ended by its follower, and one whose store cannot be reached from
there by its lease.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from airflow.listeners import hookimpl

from airflow_rankzero.links import DIRECTORY_KEY
from airflow_rankzero.tries import TaskTry
from rankzero import RunHandle
from rankzero.errors import RunNotFoundError

logger = logging.getLogger(__name__)

FOLLOWER_GRACE = 10.0
"""Seconds in which a follower has ended the training itself: it learns of the mark within a heartbeat or two."""

THREADS = 4
"""Threads for the marks of an API server. A mark of a task without a living training takes one for one query."""

_XCOMS, _TASKS = "airflow.models.xcom.XComModel", "airflow.models.taskinstance.TaskInstance"

_MARKED = ("failed", "success", "skipped")

_threads = ThreadPoolExecutor(THREADS, "rankzero-marks")


@hookimpl
def on_task_instance_failed(previous_state: Any, task_instance: Any) -> None:
    """Ends the training of a task that a user has marked as failed, succeeded or skipped."""
    # Task processes and the scheduler call listeners, too: with a state before, or with no row of the database.
    if previous_state is None and type(task_instance).__module__ == "airflow.models.taskinstance":
        # The mark is not committed yet, and the request does not wait.
        ti = task_instance
        until = time.monotonic() + FOLLOWER_GRACE
        _threads.submit(_end, ti.dag_id, ti.run_id, ti.task_id, ti.map_index, until)


@hookimpl
def on_dag_run_failed(dag_run: Any, msg: str) -> None:
    """Ends the trainings of a DAG run that has failed (by ``dagrun_timeout``, too), or that a user has marked."""
    # The states of its tasks are not committed yet, and neither the scheduler nor a request waits.
    _threads.submit(_end_all, dag_run.dag_id, dag_run.run_id)


# Airflow finds listeners by their names.
on_task_instance_success = on_task_instance_skipped = on_task_instance_failed
on_dag_run_success = on_dag_run_failed


def _end_all(dag_id: str, run_id: str) -> None:
    """Ends the living trainings of a DAG run whose tasks have ended; all their followers have the same grace."""
    until = time.monotonic() + FOLLOWER_GRACE
    try:
        for task_id, map_index in _rows(
            _XCOMS, "task_id", "map_index", dag_id=dag_id, run_id=run_id, key=DIRECTORY_KEY
        ):
            try:
                _threads.submit(_end, dag_id, run_id, task_id, map_index, until)
            except RuntimeError:
                # This process is exiting, as that of ``airflow dags test``: it awaits this thread, and starts no other.
                _end(dag_id, run_id, task_id, map_index, until)
    except Exception:
        logger.warning("the trainings of the DAG run %s are left to their leases", run_id, exc_info=True)


def _end(dag_id: str, run_id: str, task_id: str, map_index: int, until: float) -> None:
    """Ends the living training of a marked task instance, unless its follower does ``until`` then (monotonic)."""
    key = {"dag_id": dag_id, "run_id": run_id, "task_id": task_id, "map_index": map_index}
    directory = None
    try:
        directory = next(map(_value_of, _rows(_XCOMS, "value", key=DIRECTORY_KEY, **key)), None)
        if not isinstance(directory, str):
            return
        handle = RunHandle.attach(directory, follows=False)
        if handle.wait(max(0.0, until - time.monotonic())):
            return
        (task_instance,) = _rows(_TASKS, "state", "id", "try_number", **key) or (None,)
        if task_instance is None or task_instance.state not in _MARKED:
            return
        logger.info("the task %s of %s was marked or ended: ending its training in %s", task_id, run_id, directory)
        # By then a user may have cleared the task, and the next try may follow the run.
        handle.cancel(TaskTry(task_instance).receiver, "the Airflow task was marked, or its DAG run has ended")
    except RunNotFoundError:
        # Each end of a DAG run comes here, also where the store is a disk of the workers.
        logger.info("the training of the task %s is not within reach, and is left to its lease: %s", task_id, directory)
    except Exception:
        logger.warning("the training of the marked task %s is left to its lease", task_id, exc_info=True)


def _value_of(row: Any) -> Any:
    """Returns the value of an XCom, which a backend may keep elsewhere, such as in an object store."""
    backend: Any = importlib.import_module("airflow.sdk.execution_time.xcom").XCom
    return backend.deserialize_value(row)


def _rows(model: str, *columns: str, **key: Any) -> Sequence[Any]:
    """Returns columns of the rows of one of Airflow's tables that have the given values."""
    from airflow.utils.session import create_session
    from sqlalchemy import select

    module, _, name = model.rpartition(".")
    table = getattr(importlib.import_module(module), name)
    with create_session(scoped=False) as session:
        query = select(*(getattr(table, column) for column in columns)).filter_by(**key)
        return session.execute(query).all()
