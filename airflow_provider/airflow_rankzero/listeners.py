"""The listeners of the plugin: a result is acknowledged once Airflow has it, and no training outlives its task.

Airflow calls `on_task_instance_success` in the process of a task, also when its server has rejected the success. So the
state of the task is queried, and unless it is ``success``, the next try gets the result again.

`on_starting` starts a thread in the scheduler. It ends the training of a task that has ended, or whose row has
vanished, while no process of Airflow followed it: the task waited for its retry, or was deferred while no triggerer
ran. The thread compares rows of the database, so it sees a mark, the end of a DAG run and each kind of deletion alike.
A training that is followed is ended by its follower (`tries`, `triggers`). One whose task ended while no scheduler ran,
or whose store the scheduler cannot reach, is ended by its lease.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from airflow.listeners import hookimpl

from airflow_rankzero import _compat
from airflow_rankzero.links import DIRECTORY_KEY
from airflow_rankzero.tries import TaskTry, has_set, state_of
from rankzero.pipeline import store

if TYPE_CHECKING:
    from rankzero import RunHandle

logger = logging.getLogger(__name__)

RETRY_TIMEOUT = 5.0
"""Seconds of retries while the store fails to write the acknowledgement."""

_INTERVAL = 0.25

# Attribute of the task with the runs whose results it returns: several if it executes operators itself.
_OFFERED = "_rankzero_offered"


def offer(handle: RunHandle[Any], task_try: TaskTry) -> None:
    """Records the try to which the result is offered, before the value is returned to Airflow."""
    # First, so that the listener acknowledges even if the record cannot be written now.
    vars(task_try.ti.task).setdefault(_OFFERED, []).append(handle)
    handle.offer(task_try.receiver)


@hookimpl
def on_task_instance_success(previous_state: Any, task_instance: Any) -> None:
    """Acknowledges the result that this task has returned, if Airflow's server has the task as succeeded."""
    handles: list[RunHandle[Any]] = getattr(getattr(task_instance, "task", None), _OFFERED, [])
    for handle in handles:
        try:
            state = state_of(task_instance, task_instance.get_task_states)
            if state != "success":
                logger.warning(
                    "Airflow has this task as %s, so the next try gets the result of %s", state, handle.directory
                )
                return
            store.patiently(handle.acknowledge, RETRY_TIMEOUT, _INTERVAL)
        except Exception:
            # The result stays in its run directory; a clear of this task delivers it again.
            logger.warning("the delivery of %s could not be acknowledged", handle.directory, exc_info=True)


# -- trainings whose task has ended ------------------------------------------------------------

POLL_INTERVAL = 5.0
"""Seconds between two queries for the tasks that have not ended."""

FOLLOWER_GRACE = 10.0
"""Seconds in which a follower has ended the training itself: it learns of a mark within a heartbeat or two."""

_WAITING = ("scheduled", "queued", "running", "restarting", "up_for_retry", "up_for_reschedule", "deferred")
"""States of a task that has not ended, and whose training may run."""

_ENDED = ("failed", "success", "skipped", "upstream_failed", "removed")

_KEY = ("dag_id", "run_id", "task_id", "map_index")
LABELS = ("dag_id", "dag_run_id", "task_id", "map_index")  # The same, among the labels of a training


@hookimpl
def on_starting(component: Any) -> None:
    """Starts the watch in the process of a scheduler. Airflow calls this for all its components, and for tasks."""
    if type(component).__module__ == "airflow.jobs.job":
        threading.Thread(target=_watch, args=(component,), name="rankzero-watch", daemon=True).start()


def _watch(job: Any, interval: float = POLL_INTERVAL) -> None:
    watch = Watch()
    while True:
        time.sleep(interval)
        # Airflow sets the type after it has called the listener.
        if job.job_type != "SchedulerJob":
            return
        try:
            for row in watch.poll():
                # A thread for each: a store that does not respond must not keep the other trainings alive.
                threading.Thread(target=end, args=(row,), name="rankzero-end", daemon=True).start()
        except Exception:
            logger.warning("the tasks with trainings cannot be queried; the next query is in 5 s", exc_info=True)


class Watch:
    """Finds the tasks that have ended or vanished, whose trainings no follower has ended after ``grace`` seconds."""

    def __init__(self, grace: float = FOLLOWER_GRACE) -> None:
        self.grace = grace
        self._waiting: dict[tuple[Any, ...], Any] = {}
        self._ended: dict[tuple[Any, ...], tuple[float, Any]] = {}

    def poll(self) -> list[Any]:
        """Queries the tasks that have not ended and have had a training; returns those that have ended, once each."""
        # From the tasks to their XComs, each by an index: few tasks are waiting, and many XComs are kept.
        xcom, task = _compat.model("xcom.XComModel"), _compat.model("taskinstance.TaskInstance")
        columns = [*(getattr(task, name) for name in (*_KEY, "id", "try_number")), xcom.value]
        same = [getattr(task, name) == getattr(xcom, name) for name in _KEY]
        rows = _compat.rows(columns, task.state.in_(_WAITING), xcom.key == DIRECTORY_KEY, *same)
        waiting = {tuple(row[: len(_KEY)]): row for row in rows}
        for key in waiting.keys() - self._waiting.keys():
            logger.info("the training of %s is watched", key)
        now = time.monotonic()
        self._ended |= {key: (now + self.grace, self._waiting[key]) for key in self._waiting.keys() - waiting.keys()}
        self._waiting = waiting
        due = {key: row for key, (when, row) in self._ended.items() if when <= now and key not in waiting}
        self._ended = {key: one for key, one in self._ended.items() if key not in due and key not in waiting}
        return [*due.values()]


def end(row: Any) -> None:
    """Ends the living training of a task that has ended or vanished, unless its follower does."""
    from rankzero import RunHandle
    from rankzero.errors import RunNotFoundError

    directory = None
    try:
        directory = _compat.read_xcom(row)
        if not isinstance(directory, str):
            # Another operator's XCom of the same key.
            return
        handle = RunHandle[Any].attach(directory, follows=False)
        if [handle.job.labels.get(name) for name in LABELS] != [str(part) for part in row[: len(_KEY)]]:
            # A training that the task has only started, and left alone.
            return
        if handle.status().final:
            return
        task = _compat.model("taskinstance.TaskInstance")
        found = _compat.rows(
            [task.state, task.id, task.try_number], *(getattr(task, n) == getattr(row, n) for n in _KEY)
        )
        if found and found[0].state not in _ENDED:
            return
        why = has_set(found[0].state) if found else "Airflow has deleted the task"
        logger.info("%s: ending the training of %s in %s", why, row.task_id, directory)
        # By now a user may have cleared the task, or triggered its DAG run again, and another try may follow the run.
        handle.cancel(TaskTry((*found, row)[0]).receiver, why)
    except RunNotFoundError:
        # Each end of a task comes here, also where the store is a disk of the workers.
        logger.info("the training of %s is not within reach, and is left to its lease: %s", row.task_id, directory)
    except Exception:
        logger.warning("the training of %s is left to its lease", row.task_id, exc_info=True)
