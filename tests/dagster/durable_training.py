"""Definitions for trainings whose steps, or whose ranks, are hurt: what each waits for is a file in a folder."""

import os
import time
from pathlib import Path
from typing import Any

import dagster as dg

from dagster_rankzero import RankZeroIOManager, TorchDistributorResource

FOLDER = Path(os.environ.get("TEST_FOLDER", "."))


def wait_for(name: str) -> None:
    while not (FOLDER / name).exists():
        time.sleep(0.02)


def train(folder: str) -> dict[str, Any]:
    """Says its process and the epoch of the checkpoint that it began from; ends with the file ``go``."""
    import os
    import time
    from pathlib import Path

    import rankzero.train as rt

    checkpoint = rt.get_checkpoint()
    epoch = checkpoint.load()["epoch"] if checkpoint else 0
    rt.report({"loss": 1.0 - epoch / 10, "epoch": epoch}, checkpoint={"epoch": epoch + 1})
    print("rank trains")
    while not (Path(folder) / "go").exists():
        if (Path(folder) / f"fail-{epoch}").exists():
            raise ValueError("told to fail")
        time.sleep(0.02)
    return {"pid": os.getpid(), "epoch": epoch}


def body(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource) -> Any:
    """Notes its process for each try; a try after the first waits for ``again`` if that is asked for."""
    (FOLDER / f"step-{context.retry_number}").write_text(str(os.getpid()))
    if context.retry_number and (FOLDER / "hold").exists():
        wait_for("again")
    return torch_distributor.run(context, train, str(FOLDER))


durable = dg.asset(body, name="durable", retry_policy=dg.RetryPolicy(max_retries=2))
fragile = dg.asset(body, name="fragile")


@dg.asset
def streamed(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource) -> Any:
    yield from torch_distributor.stream(context, train, str(FOLDER))


daily_job = dg.define_asset_job("fragile_job", selection=[fragile])

defs = dg.Definitions(
    assets=[durable, fragile, streamed],
    jobs=[
        dg.define_asset_job("durable_job", selection=[durable]),
        dg.define_asset_job("durable_in_process", selection=[durable], executor_def=dg.in_process_executor),
        daily_job,
        dg.define_asset_job("streamed_job", selection=[streamed]),
    ],
    schedules=[dg.ScheduleDefinition(name="often", job=daily_job, cron_schedule="* * * * *")],
    resources={
        "torch_distributor": TorchDistributorResource(
            engine="local",
            store=os.environ.get("TEST_STORE"),
            env={"OF_RANK": os.environ.get("TEST_RANK_MARK", "")},
            retry_user_errors=True,
            observation_interval=0.1,
        ),
        "io_manager": RankZeroIOManager(base_path=os.environ.get("TEST_ASSETS")),
    },
)


def durable_job() -> dg.JobDefinition:
    """For `dagster.reconstructable`."""
    return defs.resolve_job_def("durable_job")


def durable_in_process() -> dg.JobDefinition:
    """The same in one process."""
    return defs.resolve_job_def("durable_in_process")


def fragile_job() -> dg.JobDefinition:
    """Without retries."""
    return defs.resolve_job_def("fragile_job")
