"""One model for each day, trained on the day's scans from the weights of the day before.

    dagster dev -f example_dags/dagster/partitioned_training.py -d example_dags

A backfill of `daily_model` trains day after day, for every day waits for the one before it. A day that
was lost leaves the next one without a warm start, and nothing else.
"""

import os
from datetime import date
from typing import Any

import dagster as dg
import digits

from dagster_rankzero import RankZeroIOManager, TorchDistributorResource, build_metric_bounds_checks, torch_asset

DAYS = dg.DailyPartitionsDefinition(start_date="2026-01-01", end_offset=1)
THE_DAY_BEFORE = dg.TimeWindowPartitionMapping(start_offset=-1, end_offset=-1)
FOLDS = 4


@dg.asset(partitions_def=DAYS, kinds={"scikitlearn"})
def daily_scans(context: dg.AssetExecutionContext) -> dict[str, Any]:
    """Scans of one day: here a quarter of the data set, in turns."""
    fold = date.fromisoformat(context.partition_key).toordinal() % FOLDS
    scans = digits.prepare()
    return {name: part[fold::FOLDS].clone() if name.startswith("train") else part for name, part in scans.items()}


@torch_asset(
    partitions_def=DAYS,
    backfill_policy=dg.BackfillPolicy.multi_run(),
    ins={
        "before": dg.AssetIn(
            key="daily_model", partition_mapping=THE_DAY_BEFORE, metadata={"allow_missing_partitions": True}
        )
    },
    pool="gpus",
    kinds={"pytorch", "spark"},
    automation_condition=dg.AutomationCondition.eager(),
)
def daily_model(daily_scans: dict[str, Any], before: dict[str, Any] | None, partition_key: str) -> dict[str, Any]:
    """The day's weights. `before` is None on the first day."""
    print(f"{partition_key}: {'from scratch' if before is None else 'warm start'}")
    return digits.train(daily_scans, epochs=3, start=before)


defs = dg.Definitions(
    assets=[daily_scans, daily_model],
    asset_checks=build_metric_bounds_checks(daily_model, {"loss": (None, 2.5)}),
    resources={
        "torch_distributor": TorchDistributorResource(num_processes=2, master=os.environ.get("SPARK_MASTER")),
        "io_manager": RankZeroIOManager(),
    },
)
