"""Delivers a run's result to Airflow: records the try that it is offered to, and acknowledges it once Airflow has it.

The plugin's listener, `on_task_instance_success`, runs when the task process has succeeded. Airflow also calls it when
its server has rejected the success, so the listener queries the task's state. Unless that is ``success``, the result is
not acknowledged, and the next try gets it again.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from airflow.listeners import hookimpl

from airflow_rankzero.tries import TaskTry, state_of
from rankzero.pipeline import store

if TYPE_CHECKING:
    from rankzero import RunHandle

logger = logging.getLogger(__name__)

RETRY_TIMEOUT = 5.0
"""Seconds of retries while the store fails to write the acknowledgement."""

_INTERVAL = 0.25

_SUCCESS = "success"

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
            if state != _SUCCESS:
                logger.warning(
                    "Airflow has this task as %s, so the next try gets the result of %s", state, handle.directory
                )
                return
            store.patiently(handle.acknowledge, RETRY_TIMEOUT, _INTERVAL)
        except Exception:
            # The result stays in its run directory; a clear of this task delivers it again.
            logger.warning("the delivery of %s could not be acknowledged", handle.directory, exc_info=True)
