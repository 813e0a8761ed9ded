"""What Dagster shows of an error, and whether its retry policy applies."""

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from tests.dagster.dagster_events import failure_of

from dagster_rankzero import TorchDistributorResource
from dagster_rankzero.failure import as_failure, may_retry
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
        (InsufficientSlotsError("", needed=4, available=2), "", True),
        (StartTimeoutError("", missing=["rank 1"]), "", True),
        (ResultError(""), "", True),
        (RunNotFoundError(""), "", True),
        # With a checkpoint the next try gets further.
        (RunTimeoutError(""), "", False),
        (RunTimeoutError(""), "checkpoint", True),
        # Somebody's word.
        (RunCancelledError(""), "checkpoint asked", False),
        # A wrong value stays wrong; a store may be back.
        (InvalidJobError("num_processes is 0"), "asked", False),
        (because_of(InvalidJobError("the store cannot be written"), OSError("no space left")), "", True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_which_errors_may_be_retried(error: RankZeroError, facts: str, expected: bool) -> None:
    assert may_retry(error, has_checkpoint="checkpoint" in facts, retry_user_errors="asked" in facts) is expected
    if facts in ("", "asked"):
        assert as_failure(error, None, retry_user_errors="asked" in facts).allow_retries is expected


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (InsufficientSlotsError("too few", needed=4, available=2), {"slots_needed": 4, "slots_available": 2}),
        (StartTimeoutError("late", missing=["rank 1", "rank 3"]), {"missing": "rank 1, rank 3"}),
        (HangError("hung", missing=[1]), {"missing_ranks": "1"}),
        (EngineError("gone"), {}),
    ],
)
def test_an_error_shows_its_name_and_facts(error: RankZeroError, shown: dict[str, Any]) -> None:
    failure = as_failure(error, None, retry_user_errors=False)
    assert failure.description == f"{type(error).__name__}: {error}"
    assert {name: entry.value for name, entry in failure.metadata.items()} == shown


def test_a_hang_shows_where_every_rank_stood(torch_distributor: TorchDistributorResource) -> None:
    def wait_for_ever() -> None:
        import threading

        threading.Event().wait()

    @dg.asset
    def hanging(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource):
        return torch_distributor.options(hang_timeout=1.0).run(context, wait_for_ever)

    result = dg.materialize([hanging], resources={"torch_distributor": torch_distributor}, raise_on_error=False)
    description, facts = failure_of(result, "hanging")
    assert description.startswith("HangError: ")
    for rank in (0, 1):
        assert f"**rank {rank}**" in str(facts["stacks"])
    assert str(facts["stacks"]).count("threading.Event().wait()") >= 1 or "wait_for_ever" in str(facts["stacks"])
    assert Path(str(facts["run_directory"])).is_dir()
