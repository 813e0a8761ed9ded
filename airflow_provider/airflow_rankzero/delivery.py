"""The result of a run on its way to Airflow: what becomes the XCom, to whom it is offered, and that Airflow has it.

A listener of the plugin: Airflow calls `on_task_instance_success` when the server has recorded a task's success, and so
its XCom. If the process dies before, the result is not acknowledged, and the next try gets it again.
"""

from __future__ import annotations

import logging
from typing import Any

from airflow.listeners import hookimpl

from airflow_rankzero.outlets import is_strict_json
from airflow_rankzero.tries import TaskTry
from rankzero import store
from rankzero.run.handle import RunHandle

logger = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds for which a store that does not take the acknowledgement is asked again."""

_INTERVAL = 0.25

# Attribute of the operator that holds the run whose result its task returns.
_OFFERED = "_rankzero_offered"


def value_of(handle: RunHandle[Any]) -> Any:
    """Rank 0's value if it is a small JSON value, else its `rankzero.ResultRef`.

    Raises:
        rankzero.RankZeroError: the run did not succeed; the type says why.
    """
    ref = handle.result_ref()
    status = handle.status()
    return status.value[0] if status.value and is_strict_json(status.value[0]) else ref


def offer(handle: RunHandle[Any], task: Any, task_try: TaskTry) -> None:
    """Before the value goes to Airflow: notes to which try."""
    handle.offer(task_try.receiver)
    vars(task)[_OFFERED] = handle


@hookimpl
def on_task_instance_success(previous_state: Any, task_instance: Any) -> None:
    """Acknowledges the result that this task has returned."""
    handle: RunHandle[Any] | None = getattr(getattr(task_instance, "task", None), _OFFERED, None)
    if handle is None:
        return
    try:
        store.patiently(handle.acknowledge, PATIENCE, _INTERVAL)
    except Exception:
        # It stays in its run directory; a clear of this task delivers it once more.
        logger.warning("the delivery of %s could not be acknowledged", handle.directory, exc_info=True)
