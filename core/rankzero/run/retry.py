"""Whether another try of a pipeline step is worth it: one rule for every orchestrator."""

from __future__ import annotations

from rankzero.errors import InvalidJobError, RankZeroError, RunCancelledError, RunTimeoutError, WorkerFailedError


def may_retry(error: RankZeroError, *, has_checkpoint: bool, retry_user_errors: bool = True) -> bool:
    """True unless the next try would end the same way, or somebody did not want it.

    Args:
        error: Why the run did not succeed.
        has_checkpoint: The next try goes on from one.
        retry_user_errors: Exceptions of the training function count as chance, as everywhere in a pipeline.
    """
    if isinstance(error, WorkerFailedError):
        # Without an exception: killed, out of memory. With a cause: it lost its peers, or asked for another attempt.
        return error.exception_type is None or error.cause is not None or retry_user_errors
    if isinstance(error, InvalidJobError):
        # A store that cannot be written now may be back; a wrong argument stays wrong.
        return isinstance(error.__cause__, OSError)
    if isinstance(error, RunTimeoutError):
        return has_checkpoint
    return not (isinstance(error, RunCancelledError) and error.requested)
