"""What Dagster's UI shows of a run and of a stored result."""

import math
from typing import Any

import dagster as dg

from rankzero import ResultRef, RunHandle

METRIC_PREFIX = "metric/"
"""Before a metric's own name, so that none can hide another entry."""


def describe_run(handle: RunHandle[Any], world_size: int) -> dict[str, dg.MetadataValue[Any]]:
    """The entries of a run that has succeeded: where, how long, last metrics, and its result."""
    status = handle.status()
    entries: dict[str, dg.MetadataValue[Any]] = {
        "run_directory": dg.MetadataValue.path(handle.directory),
        "world_size": dg.MetadataValue.int(world_size),
    }
    if status.started is not None and status.ended is not None:
        entries["duration_seconds"] = dg.MetadataValue.float(round(status.ended - status.started, 3))
    for name, value in status.metrics.items():
        entries[METRIC_PREFIX + name] = _describe_metric(value)
    return {**entries, **describe_result(handle.result_ref())}


def describe_result(ref: ResultRef) -> dict[str, dg.MetadataValue[Any]]:
    """The entries of a stored value, the same for a run's result and for an IO manager's file."""
    entries: dict[str, dg.MetadataValue[Any]] = {
        "format": dg.MetadataValue.text(ref.format),
        "size": dg.MetadataValue.int(ref.size),
        "sha256": dg.MetadataValue.text(ref.sha256),
    }
    if isinstance(ref.summary.get("parameters"), int):
        entries["parameters"] = dg.MetadataValue.int(ref.summary["parameters"])
    return entries


def _describe_metric(value: bool | int | float | str) -> dg.MetadataValue[Any]:
    if isinstance(value, bool):
        return dg.MetadataValue.bool(value)
    if isinstance(value, int):
        return dg.MetadataValue.int(value)
    if isinstance(value, float) and math.isfinite(value):
        return dg.MetadataValue.float(value)
    # JSON has no NaN and no infinity, and neither has the UI.
    return dg.MetadataValue.text(str(value))
