"""A mark or deletion of a task, or the end of its DAG run, ends its training where no process of Airflow follows it.

Such a task was deferred while no triggerer ran, or waited for its retry. Airflow's API server calls the listener for
each mark of a user, and the scheduler calls it for each DAG run that has ended, also by ``dagrun_timeout``. Deletions
pass a middleware of the API server, since no listener is called for them. A training that is followed is ended by its
follower, and one whose store cannot be reached from there by its lease.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import re
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

_KEY = ("dag_id", "run_id", "task_id", "map_index")

_ENDED = ("failed", "success", "skipped", "upstream_failed", "removed")

_DELETED = re.compile(
    r"/api/v2/dags/(?P<dag_id>[^/]+)"
    r"(/dagRuns/(?P<run_id>[^/]+)(/taskInstances/(?P<task_id>[^/]+)(/-?\d+)?)?)?/?$"
)

_threads = ThreadPoolExecutor(THREADS, "rankzero-marks")


def has_set(state: str | None) -> str:
    """Returns the reason for the end of a training whose task Airflow has in a state; None: it has none."""
    return f"Airflow has set the task to {state}" if state else "Airflow has no state of the task, as after a clear"


@hookimpl
def on_task_instance_failed(previous_state: Any, task_instance: Any) -> None:
    """Ends the training of a task that a user has marked as failed, succeeded or skipped."""
    # Task processes and the scheduler call listeners, too: with a state before, or with no row of the database.
    if previous_state is None and type(task_instance).__module__ == "airflow.models.taskinstance":
        # The mark is not committed yet, and the request does not wait.
        _threads.submit(_end_all, **{name: getattr(task_instance, name) for name in _KEY})


@hookimpl
def on_dag_run_failed(dag_run: Any, msg: str) -> None:
    """Ends the trainings of a DAG run that has failed (by ``dagrun_timeout``, too), or that a user has marked."""
    # The states of its tasks are not committed yet, and neither the scheduler nor a request waits.
    _threads.submit(_end_all, dag_id=dag_run.dag_id, run_id=dag_run.run_id)


# Airflow finds listeners by their names.
on_task_instance_success = on_task_instance_skipped = on_task_instance_failed
on_dag_run_success = on_dag_run_failed


class Deletions:
    """ASGI middleware of the API server that ends the trainings of a DAG, DAG run or task that a user deletes."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Passes each request on. A deletion also deletes the names of run directories, so they are read before it."""
        rows: Sequence[Any] = ()

        async def end_and_send(message: Any) -> None:
            if rows and message["type"] == "http.response.start" and message["status"] < 300:
                _end_each(rows)
            await send(message)

        if scope.get("method") == "DELETE" and (found := _DELETED.search(scope["path"])):
            key = {name: text for name, text in found.groupdict().items() if text}
            rows = await asyncio.to_thread(_trainings_of, key)
        await self._app(scope, receive, end_and_send)


def _end_all(**key: Any) -> None:
    """Ends the living trainings of tasks that have ended."""
    _end_each(_trainings_of(key))


def _trainings_of(key: dict[str, Any]) -> Sequence[Any]:
    """Returns the XComs that name the run directories of the tasks of a DAG, a DAG run or a single one."""
    try:
        return _rows(_XCOMS, *_KEY, "value", key=DIRECTORY_KEY, **key)
    except Exception:
        logger.warning("the trainings of %s are left to their leases", key, exc_info=True)
        return ()


def _end_each(rows: Sequence[Any]) -> None:
    """Ends the trainings that the rows name; all their followers have the same grace."""
    until = time.monotonic() + FOLLOWER_GRACE
    for row in rows:
        try:
            _threads.submit(_end, row, until)
        except RuntimeError:
            # This process is exiting, as that of ``airflow dags test``: it awaits this thread, and starts no other.
            _end(row, until)


def _end(row: Any, until: float) -> None:
    """Ends the living training of a task that has ended, unless its follower does ``until`` then (monotonic)."""
    directory = None
    try:
        directory = _value_of(row)
        if not isinstance(directory, str):
            return
        handle = RunHandle.attach(directory, follows=False)
        if handle.wait(max(0.0, until - time.monotonic())):
            return
        key = {name: getattr(row, name) for name in _KEY}
        (task_instance,) = _rows(_TASKS, "state", "id", "try_number", **key) or (None,)
        if task_instance and task_instance.state not in _ENDED:
            return
        # By then a user may have cleared the task, and the next try may follow the run.
        receiver = TaskTry(task_instance).receiver if task_instance else {}
        why = has_set(task_instance.state) if task_instance else "Airflow has deleted the task"
        logger.info("%s: ending the training of %s in %s", why, row.task_id, directory)
        handle.cancel(receiver, why)
    except RunNotFoundError:
        # Each end of a DAG run comes here, also where the store is a disk of the workers.
        logger.info("the training of %s is not within reach, and is left to its lease: %s", row.task_id, directory)
    except Exception:
        logger.warning("the training of %s is left to its lease", row.task_id, exc_info=True)


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
