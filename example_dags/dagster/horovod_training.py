"""A training that was written for Horovod, as an asset: only its import is changed.

dagster dev -f example_dags/dagster/horovod_training.py -d example_dags
"""

import os
from typing import Any

import dagster as dg
import digits
import digits_hvd

from dagster_rankzero import RankZeroIOManager, TorchDistributorResource, torch_asset


@dg.asset(kinds={"scikitlearn"})
def horovod_scans() -> dict[str, Any]:
    """Handwritten digits, split into training and test scans."""
    return digits.prepare()


@torch_asset(kinds={"pytorch", "spark"}, num_processes=2)
def horovod_model(horovod_scans: dict[str, Any]) -> dict[str, Any]:
    """The weights that Horovod's function returns on rank 0."""
    return digits_hvd.train(horovod_scans, epochs=5)


@dg.asset
def horovod_accuracy(horovod_scans: dict[str, Any], horovod_model: dict[str, Any]) -> float:
    """Share of the test scans that the model reads right."""
    return digits.accuracy(horovod_model, horovod_scans)


defs = dg.Definitions(
    assets=[horovod_scans, horovod_model, horovod_accuracy],
    resources={
        "torch_distributor": TorchDistributorResource(master=os.environ.get("SPARK_MASTER")),
        "io_manager": RankZeroIOManager(),
    },
)
