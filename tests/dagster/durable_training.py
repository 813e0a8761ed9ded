"""Definitions for trainings whose steps, or whose ranks, are hurt: what each waits for is a file in a folder."""

import os
import time
from pathlib import Path
from typing import Any

import dagster as dg

from dagster_rankzero import RankZeroIOManager, TorchDistributorResource, torch_asset

FOLDER_TAG = "test/folder"


def folder_of(context: Any) -> str:
    return str(context.run.tags.get(FOLDER_TAG) or os.environ["TEST_FOLDER"])


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
    while not Path(folder, "go").exists():
        if Path(folder, f"fail-{epoch}").exists():
            raise ValueError("told to fail")
        time.sleep(0.02)
    return {"pid": os.getpid(), "epoch": epoch}


def body(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource) -> Any:
    """Notes its process for each try; a try after the first waits while there is a file ``hold``."""
    folder = folder_of(context)
    Path(folder, f"step-{context.retry_number}").write_text(str(os.getpid()))
    while context.retry_number and Path(folder, "hold").exists():
        time.sleep(0.02)
    # With time for the write of what was reported right before a failure.
    return torch_distributor.options(stop_grace=60).run(context, train, folder)


durable = dg.asset(body, name="durable", retry_policy=dg.RetryPolicy(max_retries=2))
patient = dg.asset(body, name="patient", retry_policy=dg.RetryPolicy(max_retries=2, delay=600))
fragile = dg.asset(body, name="fragile")


@dg.asset
def streamed(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource) -> Any:
    yield from torch_distributor.stream(context, train, folder_of(context))


UNMARKED: dict[str, Any] = {"env": {"OF_RANK": "none"}}
"""For trainings that a daemon starts whenever it likes: tests look for the ranks of those that they have launched."""


@torch_asset(options=UNMARKED)
def quick() -> int:
    return 1


@torch_asset(partitions_def=dg.StaticPartitionsDefinition(["a", "b", "c"]), options=UNMARKED)
def lettered(partition_key: str) -> str:
    return partition_key.upper()


@torch_asset(num_processes=2, options={"engine": "spark"})
def stubborn() -> str:
    """Ignores every polite request to end."""
    import signal
    import threading

    import rankzero.train as rt

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rt.report({}, checkpoint={"epoch": 1})
    while True:
        threading.Event().wait(1.0)


# A process of its own for the step would import Dagster once more; it is the daemon that starts these runs that counts.
quick_job = dg.define_asset_job("quick_job", selection=[quick], executor_def=dg.in_process_executor)

defs = dg.Definitions(
    assets=[durable, patient, fragile, streamed, quick, lettered, stubborn],
    # The one of a job without another, and of a backfill.
    executor=dg.in_process_executor if os.environ.get("TEST_EXECUTOR") == "in process" else dg.multiprocess_executor,
    jobs=[
        dg.define_asset_job("durable_job", selection=[durable], executor_def=dg.multiprocess_executor),
        dg.define_asset_job("durable_in_process", selection=[durable], executor_def=dg.in_process_executor),
        dg.define_asset_job("patient_job", selection=[patient], executor_def=dg.multiprocess_executor),
        dg.define_asset_job("fragile_job", selection=[fragile], executor_def=dg.multiprocess_executor),
        dg.define_asset_job("fragile_in_process", selection=[fragile], executor_def=dg.in_process_executor),
        dg.define_asset_job("streamed_job", selection=[streamed], executor_def=dg.in_process_executor),
        dg.define_asset_job("stubborn_job", selection=[stubborn], executor_def=dg.multiprocess_executor),
        quick_job,
    ],
    schedules=[
        dg.ScheduleDefinition(
            name="often",
            job=quick_job,
            cron_schedule="* * * * *",
            should_execute=lambda tick: not tick.instance.get_runs(dg.RunsFilter(job_name="quick_job"), limit=1),
        )
    ],
    resources={
        "torch_distributor": TorchDistributorResource(
            engine="local",
            store=dg.EnvVar("TEST_STORE"),
            env={"OF_RANK": dg.EnvVar("TEST_RANK_MARK")},
            retry_user_errors=True,
            observation_interval=0.1,
        ),
        "io_manager": RankZeroIOManager(base_path=dg.EnvVar("TEST_ASSETS")),
    },
)


def durable_job() -> dg.JobDefinition:
    """For `dagster.reconstructable`."""
    return defs.resolve_job_def("durable_job")


def patient_job() -> dg.JobDefinition:
    """With ten minutes before each retry."""
    return defs.resolve_job_def("patient_job")


def durable_on_connect() -> dg.JobDefinition:
    """The same on the Spark Connect server of ``TEST_CONNECT``."""
    # The module has one `Definitions` for Dagster to find.
    resource = TorchDistributorResource(
        connect=dg.EnvVar("TEST_CONNECT"),
        store=dg.EnvVar("TEST_STORE"),
        env={"OF_RANK": dg.EnvVar("TEST_RANK_MARK")},
    )
    job = dg.define_asset_job("durable_job", selection=[durable])
    resources = {**(defs.resources or {}), "torch_distributor": resource}
    return dg.Definitions(assets=[durable], jobs=[job], resources=resources).resolve_job_def("durable_job")


def durable_in_process() -> dg.JobDefinition:
    """The same in one process."""
    return defs.resolve_job_def("durable_in_process")


def fragile_job() -> dg.JobDefinition:
    """Without retries."""
    return defs.resolve_job_def("fragile_job")


def fragile_in_process() -> dg.JobDefinition:
    """The same in one process."""
    return defs.resolve_job_def("fragile_in_process")
