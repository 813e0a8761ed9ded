"""What Airflow records about a training that has succeeded: its assets, its log, its lineage, the delivery."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_rankzero import log_groups, outlets
from airflow_rankzero.delivery import offer
from airflow_rankzero.tries import TaskTry
from rankzero import RunHandle
from rankzero.pipeline import attempt

if TYPE_CHECKING:
    from airflow.sdk import Context


def record(task: Any, context: Context, handle: RunHandle[Any]) -> str | None:
    """Records a run whose value goes to Airflow next. No failure in here fails the task.

    Args:
        task: The operator.
        context: The context of the task.
        handle: The run.

    Returns:
        The address of the result; None if it cannot be described now.
    """
    log = task.log
    rows: list[dict[str, Any]] = attempt(log, "the table of reports", lambda: outlets.read_reports(handle), [])
    facts: dict[str, Any] = attempt(log, "the description of the result", lambda: outlets.describe(handle, rows), {})
    if facts:
        attempt(log, "the extra of the asset events", lambda: outlets.fill_outlets(context, facts), None)
    attempt(log, "the table of reports", lambda: log_groups.show_reports(log, rows), None)
    attempt(log, "the description of the result", lambda: log_groups.show(log, "Result", facts), None)
    attempt(log, "the note of the delivery", lambda: offer(handle, task, TaskTry(context["ti"])), None)
    return facts.get("uri")
