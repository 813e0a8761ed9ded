"""From a Spark table to a scored table: features, training on their rows, scores, the champion's gate.

    dagster dev -f example_dags/dagster/table_training.py -d example_dags

Ranks read Spark's files themselves, each its share, and write their part of the scores.
"""

from typing import Any

import dagster as dg
import digits
import digits_table

from dagster_rankzero import TorchDistributorResource
from rankzero import ResultRef, Table


@dg.asset(kinds={"spark"})
def scan_features() -> dict[str, str]:
    """Paths of the tables that Spark has made."""
    return digits_table.write_features(str(digits.home() / "features"))


@dg.asset(kinds={"pytorch"})
def table_model(
    context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource, scan_features: dict[str, str]
) -> dg.MaterializeResult[Any]:
    """The state dict, trained on the rows."""
    return torch_distributor.options(dataset=scan_features).run(context, digits_table.train)


@dg.asset(kinds={"pytorch"})
def table_scores(
    context: dg.AssetExecutionContext,
    torch_distributor: TorchDistributorResource,
    scan_features: dict[str, str],
    table_model: dict[str, Any],
) -> dg.MaterializeResult[Any]:
    """The handle of the table that the ranks wrote."""
    return torch_distributor.options(dataset=scan_features).run(context, digits_table.score, table_model)


@dg.asset_check(asset=table_scores, blocking=True)
def scores_beat_champion(table_scores: Table) -> dg.AssetCheckResult:
    """At least as good as the model in production."""
    share = digits_table.accuracy(table_scores)
    return dg.AssetCheckResult(passed=digits.beats_champion(share), metadata={"accuracy": share})


@dg.asset
def table_champion(table_scores: Table, table_model: dict[str, Any]) -> dict[str, Any]:
    """The model in production. Comes behind the check, so that a worse model never replaces it."""
    model = ResultRef.save(table_model, digits.home() / "models")
    return digits.promote(digits_table.accuracy(table_scores), model.to_json())


defs = dg.Definitions(
    assets=[scan_features, table_model, table_scores, table_champion],
    asset_checks=[scores_beat_champion],
    resources={"torch_distributor": TorchDistributorResource(num_processes=2, engine="local")},
)
