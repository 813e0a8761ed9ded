"""A training script as it is, with its command line, as an asset.

    dagster dev -f example_dags/dagster/script_training.py -d example_dags

What the script gives to ``rankzero.train.set_result`` is the asset's value.
"""

import os
from pathlib import Path

import dagster as dg

from dagster_rankzero import RankZeroIOManager, TorchDistributorResource, torch_distributor_op

SCRIPT = Path(__file__).parents[1] / "train_digits.py"

train_digits = torch_distributor_op(
    SCRIPT,
    args=["--epochs", os.environ.get("DIGITS_EPOCHS", "25")],
    num_processes=2,
    retry_policy=dg.RetryPolicy(max_retries=1),
)


@dg.graph_asset(kinds={"pytorch", "spark"})
def script_scores() -> dict[str, float]:
    """Accuracy and world size, as the script says them."""
    return train_digits()


defs = dg.Definitions(
    assets=[script_scores],
    resources={
        "torch_distributor": TorchDistributorResource(master=os.environ.get("SPARK_MASTER")),
        "io_manager": RankZeroIOManager(),
    },
)
