"""Nightly retraining of the digits model: prepare, train on two ranks, evaluate, gate, promote.

    dagster dev -f example_dags/dagster/digits_retraining.py -d example_dags

Training is a barrier Spark job. Without ``SPARK_MASTER`` it runs on an embedded Spark of this
machine. A model that does not beat the champion fails the blocking check, and is not promoted.
A new champion deploys itself (declarative automation), and one that was not confirmed for a week is
shown as overdue (freshness).
"""

import os
from datetime import timedelta
from typing import Any

import dagster as dg
import digits

from dagster_rankzero import RankZeroIOManager, TorchDistributorResource, torch_asset
from rankzero import ResultRef

GROUP = "digits"


class TrainConfig(dg.Config):
    """Configuration of the training step, which the launchpad shows."""

    epochs: int = 25


@dg.asset(group_name=GROUP, kinds={"scikitlearn"})
def scans() -> dict[str, Any]:
    """Handwritten digits, split into training and test scans."""
    return digits.prepare()


@torch_asset(group_name=GROUP, kinds={"pytorch", "spark"}, retry_policy=dg.RetryPolicy(max_retries=1))
def model(scans: dict[str, Any], config: TrainConfig) -> dict[str, Any]:
    """The state dict that rank 0 returns. Every rank runs this body; the scans are opened there."""
    return digits.train(scans, epochs=config.epochs)


@dg.asset(group_name=GROUP)
def accuracy(context: dg.AssetExecutionContext, scans: dict[str, Any], model: dict[str, Any]) -> float:
    """Share of the test scans that the model reads right."""
    share = digits.accuracy(model, scans)
    context.add_output_metadata({"accuracy": share})
    return share


@dg.asset_check(asset=accuracy, blocking=True)
def beats_champion(accuracy: float) -> dg.AssetCheckResult:
    """Checks that the model is at least as good as the one in production."""
    reigning = digits.champion() or {"accuracy": None}
    return dg.AssetCheckResult(
        passed=digits.beats_champion(accuracy),
        metadata={"challenger": accuracy, "champion": str(reigning["accuracy"])},
    )


@dg.asset(
    group_name=GROUP,
    freshness_policy=dg.FreshnessPolicy.time_window(fail_window=timedelta(days=7), warn_window=timedelta(days=2)),
)
def champion(accuracy: float, model: dict[str, Any]) -> dict[str, Any]:
    """The model in production. Comes behind the check, so that a worse model never replaces it."""
    # A copy: the asset `model` keeps only its last versions.
    return digits.promote(accuracy, ResultRef.save(model, digits.home() / "models").to_json())


@dg.asset(automation_condition=dg.AutomationCondition.eager())
def deployment(champion: dict[str, Any]) -> dict[str, Any]:
    """Model that the serving side loads; materialized whenever there is another champion."""
    return digits.deploy(ResultRef.from_json(champion["model"]).load(), champion)


retraining = dg.define_asset_job(
    "digits_retraining", selection=dg.AssetSelection.groups(GROUP) | dg.AssetSelection.checks(beats_champion)
)

defs = dg.Definitions(
    assets=[scans, model, accuracy, champion, deployment],
    asset_checks=[beats_champion],
    jobs=[retraining],
    schedules=[dg.ScheduleDefinition(name="nightly", job=retraining, cron_schedule="0 3 * * *")],
    resources={
        "torch_distributor": TorchDistributorResource(
            num_processes=2, master=os.environ.get("SPARK_MASTER"), max_restarts=1
        ),
        "io_manager": RankZeroIOManager(),
    },
)
