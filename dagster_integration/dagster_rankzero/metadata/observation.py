"""Builds the observations that the asset page shows during a training."""

from collections.abc import Iterator, Mapping
from typing import Any

import dagster as dg

from dagster_rankzero._compat import assets_of
from dagster_rankzero.metadata.describe import METRIC_PREFIX
from rankzero.pipeline import is_number


def observe(context: Any, metrics: Mapping[str, Any]) -> Iterator[dg.AssetObservation]:
    """Yields an observation of every asset that a context's step materializes; none for an op.

    Args:
        context: Context of the asset.
        metrics: Last values by name. Finite numbers are shown, under the same names as in the materialization, so that
            Dagster plots both as one line.
    """
    numbers = {METRIC_PREFIX + name: value for name, value in metrics.items() if is_number(value)}
    if not numbers:
        return
    partition = context.partition_key if context.has_partition_key else None
    for key in assets_of(context):
        yield dg.AssetObservation(asset_key=key, partition=partition, metadata=numbers)


THINNING = 0.01
"""Least time to the next observation as a fraction of the time since the first, which limits the number of rows."""


def next_interval(interval: float, elapsed: float) -> float:
    """Returns the seconds until the next observation.

    Args:
        interval: Least seconds between two observations.
        elapsed: Seconds since the first observation.

    Example:
        >>> next_interval(5.0, 60.0), next_interval(5.0, 3600.0)
        (5.0, 36.0)
    """
    return max(interval, THINNING * elapsed)
