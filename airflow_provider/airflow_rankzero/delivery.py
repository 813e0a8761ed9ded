"""From a run that has ended to what Airflow passes on: the XCom, what assets say of it, the note of who got it."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from airflow_rankzero import tries
from rankzero.run import delivery as handover
from rankzero.run.handle import RunHandle

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


def hand(handle: RunHandle[Any], ti: Any) -> None:
    """Before the value goes to Airflow: notes which try gets it."""
    handover.note(handle, generation=tries.generation(ti), number=ti.try_number)


def _is_for(handle: RunHandle[Any], ti: Any, *, same_arguments: bool) -> bool:
    """True if the result of a run that has succeeded is this try's."""
    taker = handover.taker_of(handle)
    if taker is None:
        # Nobody got it. After a clear it is what was asked for, unless that is something else now.
        return same_arguments or handle.labels.get("generation") == tries.generation(ti)
    # A later try of the same generation: the one that got it died, or Airflow did not take its word. The same try
    # again: somebody has deleted the DAG run and made it anew, as `dag.test` does.
    return bool(taker["generation"] == tries.generation(ti) and ti.try_number > taker.get("number", 0))


def settle(before: RunHandle[Any], ti: Any, arguments: str, patience: float) -> None:
    """Before a submission: decides what an earlier run of this task instance is to this try.

    Tries that follow each other by themselves are of one generation, and take up each other's training and result.
    After a clear, which makes another generation:

    * a result that nobody got is delivered; one that was handed to Airflow is not, and the task trains anew;
    * a training that lives is ended;
    * a training that failed goes on from its last checkpoint;
    * a result or a checkpoint of other arguments does not count.

    Args:
        before: The run.
        ti: The task instance.
        arguments: The digest of its arguments, as in the labels of the run.
        patience: Seconds for a live run to end.
    """
    status = before.status()
    same_arguments = before.labels.get("arguments") == arguments
    if status.state == "succeeded":
        if not _is_for(before, ti, same_arguments=same_arguments):
            before.mark_delivered()
        return
    if before.labels.get("generation") == tries.generation(ti):
        return
    if not status.final:
        logger.info("the task was cleared, so the training in %s is ended", before.directory)
        before.cancel()
        before.wait(patience)
    if not same_arguments:
        logger.info("the arguments have changed, so the training begins from scratch")
        before.mark_delivered()
