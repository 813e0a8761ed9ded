"""What Dagster shows of an error, and whether its retry policy applies."""

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from tests.dagster.dagster_events import failure_of, retries_of

from dagster_rankzero import TorchDistributorResource, torch_asset
from dagster_rankzero.step import as_failure
from rankzero import EngineError, HangError, RankZeroError, RunCancelledError


@pytest.mark.parametrize("error", [RunCancelledError("by a user", requested=True), EngineError("the driver died")])
def test_dagster_retries_what_the_rule_of_core_allows(error: RankZeroError) -> None:
    assert as_failure(error, None, retry_user_errors=True).allow_retries is isinstance(error, EngineError)


@pytest.mark.parametrize(
    ("error", "shown"),
    [
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


def test_the_last_try_shows_the_error_of_the_training(torch_distributor: TorchDistributorResource) -> None:
    @torch_asset(retry_policy=dg.RetryPolicy(max_retries=1))
    def broken() -> int:
        raise ValueError("a wrong label")

    resources = {"torch_distributor": torch_distributor.options(num_processes=1)}
    result = dg.materialize([broken], resources=resources, raise_on_error=False)
    assert retries_of(result, "broken") == 1
    (event,) = result.get_step_failure_events()
    error = event.step_failure_data.error
    assert error is not None
    assert "a wrong label" in error.message
    assert "max_retries" not in error.to_string()
    assert failure_of(result, "broken")[1]["exception_type"] == "ValueError"
