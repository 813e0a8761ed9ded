"""From a run that has ended to what Airflow passes on: the XCom, what assets say of it, the note that it arrived."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from rankzero.run import RunHandle

if TYPE_CHECKING:
    from airflow.sdk import Context

logger = logging.getLogger(__name__)


def value_of(handle: RunHandle[Any]) -> Any:
    """Rank 0's value if it is a small JSON value, else its `rankzero.ResultRef`.

    Raises:
        rankzero.RankZeroError: the run did not succeed; the type says why.
    """
    ref = handle.result_ref()
    status = handle.status()
    return status.value[0] if status.value and _is_strict_json(status.value[0]) else ref


def _is_strict_json(value: Any) -> bool:
    """False for a diverged loss: Airflow's API server refuses ``nan`` and ``inf``."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def describe(handle: RunHandle[Any], num_processes: int) -> dict[str, Any]:
    """What an asset event says about the result: where it is, what it is, how it was made."""
    ref, status = handle.result_ref(), handle.status()
    return {
        "uri": ref.uri,
        "format": ref.format,
        "size": ref.size,
        "sha256": ref.sha256,
        "world_size": num_processes,
        "run_directory": handle.directory,
        "metrics": {name: value for name, value in status.metrics.items() if _is_strict_json(value)},
    }


def fill_outlets(context: Context, facts: dict[str, Any]) -> None:
    """Adds the facts to the events of the task's assets; what the user's own code wrote there stays."""
    from airflow.sdk import Asset

    for outlet in context["outlets"]:
        if isinstance(outlet, Asset):
            event = context["outlet_events"][outlet]
            event.extra = {**facts, **(event.extra or {})}


def settle(handle: RunHandle[Any], generation: str) -> None:
    """Before a submission: a result that earlier tries delivered is not this one's, which trains anew.

    A task that succeeded and was cleared is told from a try that died before it could hand the result on by the
    generation of tries that submitted the run; `mark` tells most of them already.
    """
    if handle.status().state == "succeeded" and handle.labels.get("generation") != generation:
        handle.mark_delivered()


def mark(task_instance: Any) -> None:
    """After a success: notes that the XCom has it, so that clearing the task trains from scratch."""
    directory = getattr(getattr(task_instance, "task", None), "delivered_run", None)
    if directory is None:
        return
    try:
        RunHandle.attach(directory).mark_delivered()
    except Exception:
        logger.warning("the run in %s could not be marked as delivered", directory, exc_info=True)
