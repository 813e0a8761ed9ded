"""Definitions for trainings whose steps, or whose ranks, are hurt: what each waits for is a file in a folder."""

import os
from pathlib import Path
from typing import Any

import dagster as dg

from dagster_rankzero import RankZeroIOManager, TorchDistributorResource

FOLDER_TAG = "test/folder"


def train(folder: str) -> dict[str, int]:
    """Reports a checkpoint, and ends with the file ``go``."""
    import os
    import time
    from pathlib import Path

    import rankzero.train as rt

    rt.report({"loss": 1.0}, checkpoint={"epoch": 1})
    while not Path(folder, "go").exists():
        time.sleep(0.02)
    return {"pid": os.getpid()}


def body(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource) -> Any:
    """Notes its process for each try."""
    folder = context.run.tags[FOLDER_TAG]
    Path(folder, f"step-{context.retry_number}").write_text(str(os.getpid()))
    return torch_distributor.run(context, train, folder)


durable = dg.asset(body, name="durable", retry_policy=dg.RetryPolicy(max_retries=2))
fragile = dg.asset(body, name="fragile")


defs = dg.Definitions(
    assets=[durable, fragile],
    jobs=[
        dg.define_asset_job("durable_job", selection=[durable], executor_def=dg.multiprocess_executor),
        dg.define_asset_job("fragile_job", selection=[fragile], executor_def=dg.multiprocess_executor),
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
