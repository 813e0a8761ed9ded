"""Turns an error of a run into Dagster's failure, which decides about retries."""

import re
from typing import Any

import dagster as dg

from rankzero import HangError, InsufficientSlotsError, RankZeroError, RunHandle, StartTimeoutError, WorkerFailedError
from rankzero.pipeline import may_retry


def as_failure(error: RankZeroError, handle: RunHandle[Any] | None, *, retry_user_errors: bool) -> dg.Failure:
    """Returns the `dagster.Failure` for an error of a run, with its cause, the run directory, and the retry decision.

    Args:
        error: The error of the run.
        handle: The run, if it was started.
        retry_user_errors: Whether a `dagster.RetryPolicy` applies to exceptions of the training function.

    Returns:
        A failure; with ``allow_retries`` the op's or asset's `dagster.RetryPolicy` decides.
    """
    has_checkpoint = handle is not None and handle.status().checkpoint is not None
    entries = _describe(error)
    if handle is not None:
        entries["run_directory"] = dg.MetadataValue.path(handle.directory)
    return dg.Failure(
        description=str(error) if isinstance(error, WorkerFailedError) else f"{type(error).__name__}: {error}",
        metadata=entries,
        allow_retries=may_retry(error, has_checkpoint=has_checkpoint, retry_user_errors=retry_user_errors),
    )


def _describe(error: RankZeroError) -> dict[str, dg.MetadataValue[Any]]:
    if isinstance(error, WorkerFailedError):
        return _describe_worker(error)
    if isinstance(error, HangError):
        return _describe_hang(error)
    if isinstance(error, InsufficientSlotsError):
        counts = {"slots_needed": error.needed, "slots_available": error.available}
        return {name: dg.MetadataValue.int(count) for name, count in counts.items() if count is not None}
    if isinstance(error, StartTimeoutError) and error.missing:
        return {"missing": dg.MetadataValue.text(", ".join(error.missing))}
    return {}


def _describe_worker(error: WorkerFailedError) -> dict[str, dg.MetadataValue[Any]]:
    entries: dict[str, dg.MetadataValue[Any]] = {}
    if error.rank is not None:
        entries["rank"] = dg.MetadataValue.int(error.rank)
    for name in ("host", "exception_type", "signal"):
        if getattr(error, name):
            entries[name] = dg.MetadataValue.text(getattr(error, name))
    if error.exit_code is not None:
        entries["exit_code"] = dg.MetadataValue.int(error.exit_code)
    if error.traceback:
        entries["traceback"] = _code_block(error.traceback)
    if error.log_tail:
        entries["log_tail"] = _code_block("\n".join(error.log_tail))
    if error.others:
        entries["other_ranks"] = _code_block("\n".join(error.others))
    return entries


def _describe_hang(error: HangError) -> dict[str, dg.MetadataValue[Any]]:
    entries: dict[str, dg.MetadataValue[Any]] = {}
    if error.missing:
        entries["missing_ranks"] = dg.MetadataValue.text(", ".join(map(str, error.missing)))
    if error.stacks:
        blocks = [f"**rank {rank}**\n\n{_fence(stack)}" for rank, stack in error.stacks.items()]
        entries["stacks"] = dg.MetadataValue.md("\n\n".join(blocks))
    return entries


def _code_block(text: str) -> dg.MetadataValue[Any]:
    return dg.MetadataValue.md(_fence(text))


def _fence(text: str) -> str:
    # The fence must be longer than any in the text.
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(4, longest + 1)
    return f"{fence}text\n{text.rstrip()}\n{fence}"
