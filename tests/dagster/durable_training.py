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
fragile = dg.asset(body, name="fragile")


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


defs = dg.Definitions(
    assets=[durable, fragile, stubborn],
    jobs=[
        dg.define_asset_job("durable_job", selection=[durable], executor_def=dg.multiprocess_executor),
        dg.define_asset_job("durable_in_process", selection=[durable], executor_def=dg.in_process_executor),
        dg.define_asset_job("fragile_job", selection=[fragile], executor_def=dg.multiprocess_executor),
        dg.define_asset_job("stubborn_job", selection=[stubborn], executor_def=dg.multiprocess_executor),
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
