"""Decides whether another try of a pipeline step can help, by one rule for every orchestrator."""

from __future__ import annotations

from rankzero.errors import InvalidJobError, RankZeroError, RunCancelledError, RunTimeoutError, WorkerFailedError


def may_retry(error: RankZeroError, *, has_checkpoint: bool, retry_user_errors: bool = True) -> bool:
    """Returns True unless the next try would fail in the same way, or a user cancelled the run.

    Args:
        error: The error of the run.
        has_checkpoint: True if the next try resumes from a checkpoint.
        retry_user_errors: True if exceptions of the training function are retried, like those of other steps.
    """
    if isinstance(error, WorkerFailedError):
        # Without an exception, the rank was killed. With a cause, it lost its peers or requested another attempt.
        return error.exception_type is None or error.cause is not None or retry_user_errors
    if isinstance(error, InvalidJobError):
        # A store that cannot be written may recover; a wrong argument stays wrong.
        return isinstance(error.__cause__, OSError)
    if isinstance(error, RunTimeoutError):
        return has_checkpoint
    return not (isinstance(error, RunCancelledError) and error.requested)
