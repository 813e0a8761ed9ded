"""From an error of a run to what Dagster should do about it."""

from typing import Any

import dagster as dg

from rankzero import InvalidJobError, RankZeroError, RunCancelledError, WorkerFailedError


def as_failure(error: RankZeroError, run_directory: str | None, retry_user_errors: bool) -> dg.Failure | None:
    """The `dagster.Failure` for errors that need one.

    Args:
        error: Why the run did not succeed.
        run_directory: Where the run lies, if it began.
        retry_user_errors: Let a `dagster.RetryPolicy` apply to exceptions of the training function.

    Returns:
        A failure, or None for errors of the infrastructure: raised as they are, they are retried
        if the op or asset has a `dagster.RetryPolicy`. A rank that died without an exception
        (killed, out of memory), lost its peers or raised `rankzero.RetryableError` may be retried;
        another exception of the training function and a wrong argument may not, for the next try
        would end the same way.
    """
    if isinstance(error, WorkerFailedError):
        retries = error.exception_type is None or error.cause is not None or retry_user_errors
        return dg.Failure(
            description=str(error),
            metadata=_describe_worker(error, run_directory),
            allow_retries=retries,
        )
    if isinstance(error, (InvalidJobError, RunCancelledError)):
        metadata = {"run_directory": dg.MetadataValue.path(run_directory)} if run_directory else {}
        return dg.Failure(description=str(error), metadata=metadata, allow_retries=False)
    return None


def _describe_worker(error: WorkerFailedError, run_directory: str | None) -> dict[str, dg.MetadataValue[Any]]:
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
    if run_directory:
        entries["run_directory"] = dg.MetadataValue.path(run_directory)
    return entries


def _code_block(text: str) -> dg.MetadataValue[Any]:
    # Longer than any fence that the text may hold.
    return dg.MetadataValue.md(f"````text\n{text.rstrip()}\n````")
