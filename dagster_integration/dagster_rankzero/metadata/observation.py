"""What the asset page shows of a training while its ranks train."""

from collections.abc import Iterator, Mapping
from typing import Any

import dagster as dg

from dagster_rankzero._compat import assets_of
from dagster_rankzero.metadata.describe import METRIC_PREFIX, is_number


def observe(context: Any, metrics: Mapping[str, Any]) -> Iterator[dg.AssetObservation]:
    """An observation of every asset that a context's step makes; none for an op.

    Args:
        context: Of the asset.
        metrics: Last values, by name. Finite numbers are shown, under the names that the materialization gives them
            too: Dagster plots both as one line.
    """
    numbers = {METRIC_PREFIX + name: value for name, value in metrics.items() if is_number(value)}
    if not numbers:
        return
    partition = context.partition_key if context.has_partition_key else None
    for key in assets_of(context):
        yield dg.AssetObservation(asset_key=key, partition=partition, metadata=numbers)
