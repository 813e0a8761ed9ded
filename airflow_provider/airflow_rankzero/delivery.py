"""From a run that has ended to what Airflow passes on: the XCom, what assets say of it, the note that it arrived."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rankzero import store
from rankzero.directory import RunDirectory
from rankzero.run import RunHandle

if TYPE_CHECKING:
    from airflow.sdk import Context

logger = logging.getLogger(__name__)

# File of a run directory: who got its result.
_NOTE = "handed"


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


def hand(handle: RunHandle[Any], generation: str) -> None:
    """Before the value goes to Airflow: notes for which generation of tries it is."""
    note = {"submission": handle.submission, "generation": generation}
    store.write_bytes(store.join(handle.directory, _NOTE), json.dumps(note).encode())


def _handed(handle: RunHandle[Any]) -> str | None:
    """The generation of tries that got the result of the last submission; None if none did."""
    try:
        note = json.loads(store.read_bytes(store.join(handle.directory, _NOTE)))
    except FileNotFoundError:
        return None
    return str(note["generation"]) if note["submission"] == handle.submission else None


def settle(before: RunHandle[Any], labels: Mapping[str, str], patience: float) -> None:
    """Before a submission: decides what an earlier run of this task instance is to this try.

    Tries that follow each other by themselves are of one generation, and take up each other's training and result.
    After a clear, which makes another generation:

    * a result that nobody got is delivered; one that was handed to Airflow is not, and the task trains anew;
    * a training that lives is ended;
    * one that failed goes on from its last checkpoint, unless the task's arguments are others now.

    Args:
        before: The run.
        labels: Of the launcher: ``generation`` and ``arguments``.
        patience: Seconds for a live run to end.
    """
    status, generation = before.status(), labels["generation"]
    if status.state == "succeeded":
        if _handed(before) not in (None, generation):
            before.mark_delivered()
        return
    if before.labels.get("generation") == generation:
        return
    if not status.final:
        logger.info("the task was cleared, so the training in %s is ended", before.directory)
        before.cancel()
        before.wait(patience)
    if before.labels.get("arguments") != labels["arguments"]:
        logger.info("the arguments have changed, so the training begins from scratch")
        before.mark_delivered()


def mark(task_instance: Any) -> None:
    """After a success: notes that the XCom has it, so that clearing the task trains from scratch."""
    delivered = getattr(getattr(task_instance, "task", None), "delivered_run", None)
    if delivered is None:
        return
    directory, submission = delivered
    try:
        RunDirectory(directory).mark_delivered(submission)
    except Exception:
        logger.warning("the run in %s could not be marked as delivered", directory, exc_info=True)
