"""Which errors of a run are worth another try of its pipeline step, as a table."""

import pytest

from rankzero import (
    EngineError,
    HangError,
    InsufficientSlotsError,
    InvalidJobError,
    RankZeroError,
    ResultError,
    RunCancelledError,
    RunNotFoundError,
    RunTimeoutError,
    StartTimeoutError,
    WorkerFailedError,
)
from rankzero.run.tries import may_retry


def because_of(error: RankZeroError, cause: BaseException) -> RankZeroError:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "facts", "expected"),
    [
        # The function's own exception comes again, unless it is a matter of chance.
        (WorkerFailedError("", exception_type="ValueError"), "", False),
        (WorkerFailedError("", exception_type="ValueError"), "asked", True),
        (WorkerFailedError("", exception_type="ValueError"), "checkpoint", False),
        (WorkerFailedError("", exception_type="x.RetryableError", cause="retryable"), "", True),
        (WorkerFailedError("", exception_type="x.DistError", cause="lost"), "", True),
        (WorkerFailedError("", signal="SIGKILL", cause="killed"), "", True),
        (WorkerFailedError("", exit_code=1), "", True),
        # The infrastructure.
        (HangError(""), "", True),
        (EngineError("the driver died"), "", True),
        (InsufficientSlotsError(""), "", True),
        (StartTimeoutError("", missing=["rank 1"]), "", True),
        (ResultError(""), "", True),
        (RunNotFoundError(""), "", True),
        # With a checkpoint the next try gets further.
        (RunTimeoutError(""), "", False),
        (RunTimeoutError(""), "checkpoint", True),
        # Requested by a user.
        (RunCancelledError("", requested=True), "checkpoint asked", False),
        # Its driver was told to go, or its lease ran out.
        (RunCancelledError("the driver got SIGTERM"), "", True),
        # A wrong value stays wrong; a store may be back.
        (InvalidJobError("num_processes is 0"), "asked", False),
        (because_of(InvalidJobError("the store cannot be written"), OSError("no space left")), "", True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_which_errors_may_be_retried(error: RankZeroError, facts: str, expected: bool) -> None:
    assert may_retry(error, has_checkpoint="checkpoint" in facts, retry_user_errors="asked" in facts) is expected
