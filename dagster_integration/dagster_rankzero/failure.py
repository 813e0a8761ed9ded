"""Turns an error of a run into Dagster's failure, which decides about retries."""

import re
from typing import Any

import dagster as dg

from dagster_rankzero.step import Step
from rankzero import HangError, InsufficientSlotsError, RankZeroError, RunHandle, StartTimeoutError, WorkerFailedError
from rankzero.pipeline import may_retry


def as_failure(
    error: RankZeroError, handle: RunHandle[Any] | None, step: Step | None = None, *, retry_user_errors: bool
) -> dg.Failure:
    """Returns the `dagster.Failure` for an error of a run, with its cause, the run directory, and the retry decision.

    Args:
        error: The error of the run.
        handle: The run, if it was started.
        step: The try of the step, if any. After the last one "Exceeded max_retries" would hide the error.
        retry_user_errors: Whether a `dagster.RetryPolicy` applies to exceptions of the training function.

    Returns:
        A failure; with ``allow_retries`` the op's or asset's `dagster.RetryPolicy` decides.
    """
    has_checkpoint = handle is not None and handle.status().checkpoint is not None
    entries = _describe(error)
    if handle is not None:
        entries["run_directory"] = dg.MetadataValue.path(handle.directory)
    can_help = may_retry(error, has_checkpoint=has_checkpoint, retry_user_errors=retry_user_errors)
    return dg.Failure(
        description=str(error) if isinstance(error, WorkerFailedError) else f"{type(error).__name__}: {error}",
        metadata=entries,
        allow_retries=can_help and (step is None or step.is_retried),
    )


def _describe(error: RankZeroError) -> dict[str, Any]:
    """Returns the facts of an error by name; Dagster shows plain values as they are."""
    facts: dict[str, Any] = {}
    if isinstance(error, WorkerFailedError):
        facts = {name: getattr(error, name) for name in ("rank", "host", "exception_type", "signal", "exit_code")}
        texts = {"traceback": error.traceback, "log_tail": error.log_tail, "other_ranks": error.others}
        for name, text in texts.items():
            if text:
                facts[name] = dg.MetadataValue.md(_fence(text if isinstance(text, str) else "\n".join(text)))
    elif isinstance(error, HangError):
        facts["missing_ranks"] = ", ".join(map(str, error.missing or ()))
        if error.stacks:
            blocks = [f"**rank {rank}**\n\n{_fence(stack)}" for rank, stack in error.stacks.items()]
            facts["stacks"] = dg.MetadataValue.md("\n\n".join(blocks))
    elif isinstance(error, InsufficientSlotsError):
        facts = {"slots_needed": error.needed, "slots_available": error.available}
    elif isinstance(error, StartTimeoutError):
        facts["missing"] = ", ".join(error.missing or ())
    return {name: fact for name, fact in facts.items() if fact not in (None, "")}


def _fence(text: str) -> str:
    # The fence must be longer than any in the text.
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(4, longest + 1)
    return f"{fence}text\n{text.rstrip()}\n{fence}"
