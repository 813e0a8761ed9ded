"""What trainings run on, and where their values are stored."""

import os

import dagster as dg

from dagster_rankzero import RankZeroIOManager, TorchDistributorResource

defs = dg.Definitions(
    resources={
        "torch_distributor": TorchDistributorResource(
            engine="local" if os.environ.get("WITHOUT_SPARK") else "spark", master=os.environ.get("SPARK_MASTER")
        ),
        "io_manager": RankZeroIOManager(),
    }
)
