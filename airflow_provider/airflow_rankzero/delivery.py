"""From a run that has ended to what Airflow passes on: the XCom, and the note of who got it."""

from __future__ import annotations

import logging
from typing import Any

from airflow_rankzero import tries
from airflow_rankzero.outlets import is_strict_json
from rankzero import handover
from rankzero.run import RunHandle

logger = logging.getLogger(__name__)


def value_of(handle: RunHandle[Any]) -> Any:
    """Rank 0's value if it is a small JSON value, else its `rankzero.ResultRef`.

    Raises:
        rankzero.RankZeroError: the run did not succeed; the type says why.
    """
    ref = handle.result_ref()
    status = handle.status()
    return status.value[0] if status.value and is_strict_json(status.value[0]) else ref


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
