"""Rank 0 speaks Dagster Pipes over our channel."""

from typing import Any

import dagster as dg
import pytest

from dagster_rankzero import TorchDistributorResource, torch_asset


def train() -> str:
    from dagster_pipes import open_dagster_pipes

    import rankzero.train as rt

    if rt.get_context().rank == 0:
        with open_dagster_pipes() as pipes:
            print("a line between messages")
            pipes.log.info("from rank 0 of %d", rt.get_context().world_size)
            pipes.report_asset_check("finite", passed=True, metadata={"worst": 3.5})
            pipes.report_custom_message({"note": "x" * 100_000})
            pipes.report_asset_materialization({"rows": 17, "world_size": -1}, data_version="v7")
    return "value"


def event(result: dg.ExecuteInProcessResult, kind: str) -> Any:
    (found,) = [event for event in result.all_events if event.event_type_value == kind]
    return found.event_specific_data


@pytest.mark.parametrize("form", ["decorated", "called"])
def test_what_rank_0_reports_belongs_to_the_asset(
    torch_distributor: TorchDistributorResource, capfd: pytest.CaptureFixture[str], form: str
) -> None:
    checks = [dg.AssetCheckSpec("finite", asset="model")]
    if form == "decorated":

        @torch_asset(name="model", options={"pipes": True}, check_specs=checks)
        def model():
            return train()

    else:

        @dg.asset(check_specs=checks)
        def model(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource):
            yield from torch_distributor.options(pipes=True).stream(context, train)

    done = dg.materialize([model], resources={"torch_distributor": torch_distributor})
    assert done.output_for_node("model") == "value"
    made = event(done, "ASSET_MATERIALIZATION").materialization
    shown = {name: entry.value for name, entry in made.metadata.items()}
    assert shown["rows"] == 17
    assert shown["world_size"] == 2, "the run's own facts are not to be overwritten"
    assert shown["pipes_messages"] == [{"note": "x" * 100_000}]
    assert made.tags["dagster/data_version"] == "v7"
    check = event(done, "ASSET_CHECK_EVALUATION")
    assert check.passed
    assert check.metadata["worst"].value == 3.5
    printed = capfd.readouterr()
    assert "a line between messages" in printed.out
    assert "__dagster_pipes_version" not in printed.out
    assert "from rank 0 of 2" in printed.err


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_message_behind_an_unfinished_line_counts(
    torch_distributor: TorchDistributorResource, capfd: pytest.CaptureFixture[str], stream: str
) -> None:
    def report(stream: str) -> int:
        import sys

        from dagster_pipes import open_dagster_pipes

        with open_dagster_pipes() as pipes:
            for text in ("\r 50%|#####     | 1/2 ", "loss ", '{"'):
                print(text, end="", file=getattr(sys, stream), flush=True)
                pipes.report_custom_message({"after": text})
            print("the end")
        return 5

    @dg.asset
    def model(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource):
        return torch_distributor.options(pipes=True, num_processes=1).run(context, report, stream)

    done = dg.materialize([model], resources={"torch_distributor": torch_distributor})
    made = event(done, "ASSET_MATERIALIZATION").materialization.metadata
    assert [each["after"] for each in made["pipes_messages"].value] == ["\r 50%|#####     | 1/2 ", "loss ", '{"']
    shown = capfd.readouterr().out
    assert "__dagster_pipes_version" not in shown
    assert all(f"[0] {text}" in shown for text in ("loss ", '{"', "the end"))
    assert " 50%|#####     | 1/2 " in shown


def test_messages_are_read_if_no_line_is_shown(torch_distributor: TorchDistributorResource) -> None:
    @dg.asset(check_specs=[dg.AssetCheckSpec("finite", asset="model")])
    def model(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource):
        return torch_distributor.options(pipes=True, log_ranks=[]).run(context, train)

    done = dg.materialize([model], resources={"torch_distributor": torch_distributor})
    assert event(done, "ASSET_MATERIALIZATION").materialization.metadata["rows"].value == 17


def test_what_an_attempt_reported_that_was_restarted_does_not_count(
    torch_distributor: TorchDistributorResource,
) -> None:
    def train_twice() -> int:
        import os
        import signal
        import time

        from dagster_pipes import open_dagster_pipes

        import rankzero.train as rt

        attempt = rt.get_context().attempt
        with open_dagster_pipes() as pipes:
            pipes.report_custom_message({"attempt": attempt})
            pipes.report_asset_check("finite", passed=attempt == 1)
            pipes.report_asset_materialization({"rows": 10 + attempt})
            if attempt == 0:
                time.sleep(1.0)  # Its lines shall be on their way.
                os.kill(os.getpid(), signal.SIGKILL)
        return attempt

    @dg.asset(check_specs=[dg.AssetCheckSpec("finite", asset="model")])
    def model(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource):
        return torch_distributor.options(pipes=True, num_processes=1, max_restarts=1).run(context, train_twice)

    done = dg.materialize([model], resources={"torch_distributor": torch_distributor})
    made = event(done, "ASSET_MATERIALIZATION").materialization.metadata
    assert made["rows"].value == 11
    assert made["pipes_messages"].value == [{"attempt": 1}]
    assert event(done, "ASSET_CHECK_EVALUATION").passed


def test_a_failure_is_the_rank_s_with_pipes_too(torch_distributor: TorchDistributorResource) -> None:
    def fail() -> None:
        from dagster_pipes import open_dagster_pipes

        with open_dagster_pipes():
            raise KeyError("lost")

    @dg.asset
    def model(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource):
        return torch_distributor.options(pipes=True, num_processes=1).run(context, fail)

    done = dg.materialize([model], resources={"torch_distributor": torch_distributor}, raise_on_error=False)
    assert not done.success
    failure = done.failure_data_for_node("model")
    assert failure is not None
    assert failure.user_failure_data.metadata["exception_type"].value == "KeyError"


def test_an_op_may_report_assets(torch_distributor: TorchDistributorResource) -> None:
    def report() -> int:
        from dagster_pipes import open_dagster_pipes

        with open_dagster_pipes() as pipes:
            pipes.report_asset_materialization({"rows": 3}, asset_key="elsewhere")
        return 5

    @dg.op
    def make(context: dg.OpExecutionContext, torch_distributor: TorchDistributorResource):
        return torch_distributor.options(pipes=True, num_processes=1).run(context, report)

    @dg.job(resource_defs={"torch_distributor": torch_distributor})
    def pipeline():
        make()

    done = pipeline.execute_in_process()
    assert done.output_for_node("make") == 5
    assert event(done, "ASSET_MATERIALIZATION").materialization.asset_key == dg.AssetKey("elsewhere")
