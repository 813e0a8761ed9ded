"""What Dagster shows of an error, and whether its retry policy applies."""

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from tests.dagster.dagster_events import failure_of, retries_of

import rankzero.train as rt
from dagster_rankzero import TorchDistributorResource, torch_asset
from dagster_rankzero.step import as_failure
from rankzero import EngineError, HangError, RankZeroError, RunCancelledError, RunHandle


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


@pytest.mark.parametrize("retries", [1, 0])
def test_a_failing_rank_shows_its_cause_and_is_retried_if_user_errors_are(
    torch_distributor: TorchDistributorResource, retries: int
) -> None:
    @torch_asset(retry_policy=dg.RetryPolicy(max_retries=1), options={"retry_user_errors": bool(retries)})
    def broken() -> None:
        if rt.get_context().rank == 1:
            print("about to divide")
            _ = 1 / 0

    resources = {"torch_distributor": torch_distributor}
    result = dg.materialize([broken], resources=resources, raise_on_error=False)
    assert retries_of(result, "broken") == retries
    (event,) = result.get_step_failure_events()
    error = event.step_failure_data.error
    assert error is not None
    assert "division by zero" in error.message
    # The last try shows the error of the training.
    assert "max_retries" not in error.to_string()
    _, facts = failure_of(result, "broken")
    assert (facts["rank"], facts["exception_type"], bool(facts["host"])) == (1, "ZeroDivisionError", True)
    assert "_ = 1 / 0" in facts["traceback"]
    assert "about to divide" in facts["log_tail"]
    assert RunHandle.attach(facts["run_directory"]).status().state == "failed"
    assert not result.get_asset_materialization_events()
