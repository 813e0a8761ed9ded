"""A training that was written for Ray Train, and one with a decorator, each as an asset.

    dagster dev -f example_dags/dagster/front_doors.py -d example_dags

What the resource runs is durable: the next try of the step attaches to its training, or resumes it.
"""

import os
from typing import Any

import dagster as dg
import digits
import digits_doors

from dagster_rankzero import RankZeroIOManager, TorchDistributorResource

EPOCHS = int(os.environ.get("DIGITS_EPOCHS", "25"))


@dg.asset(kinds={"scikitlearn"})
def door_scans() -> dict[str, Any]:
    """Handwritten digits, split into training and test scans."""
    return digits.prepare()


@dg.asset(kinds={"pytorch", "spark"})
def ray_train_accuracy(
    context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource, door_scans: dict[str, Any]
) -> dg.MaterializeResult[Any]:
    """Ray Train's trainer, which says itself how many workers it has."""
    return torch_distributor.run(context, digits_doors.ray_trainer(door_scans, EPOCHS))


@dg.asset(kinds={"pytorch", "spark"})
def decorated_accuracy(
    context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource, door_scans: dict[str, Any]
) -> dg.MaterializeResult[Any]:
    """A function with rankzero's decorator, whose options are the resource's here."""
    return torch_distributor.run(context, digits_doors.decorated, door_scans, EPOCHS)


TRAININGS = [ray_train_accuracy, decorated_accuracy]

defs = dg.Definitions(
    assets=[door_scans, *TRAININGS],
    jobs=[dg.define_asset_job("front_doors", selection=[door_scans, *TRAININGS])],
    resources={
        "torch_distributor": TorchDistributorResource(num_processes=2, master=os.environ.get("SPARK_MASTER")),
        "io_manager": RankZeroIOManager(),
    },
)
