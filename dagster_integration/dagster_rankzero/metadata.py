"""Builds the metadata that Dagster's UI shows of a run and of a stored result."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_rankzero._compat import assets_of
from rankzero.pipeline import BLOCKS, PLAIN, REPORT_FILE, attempt, curves, is_number, reports, split

if TYPE_CHECKING:
    from rankzero import ResultRef, RunHandle

logger = logging.getLogger(__name__)

_Entries = dict[str, dg.MetadataValue[Any]]

THINNING = 0.01
"""Least time to the next observation as a fraction of the time since the first, which limits the number of rows."""

METRIC_PREFIX = "metric/"
"""Prefix of metrics' names, so that a metric cannot replace another entry."""

RESULT_ENTRIES = frozenset({"format", "size", PLAIN, BLOCKS, "parameters", "dtypes"})
"""Names of the entries of `describe_result` other than metrics."""

TABLE_ROWS = 50
"""Most rows of the tables of reports and of partitions."""

TABLE_DIGITS = 9
"""Digits of a fraction in a table; the run directory has all digits."""


def describe_run(handle: "RunHandle[Any]", log: Any = logger) -> _Entries:
    """Returns the entries of a run that has succeeded: location, duration, throughput, reports, and result.

    An entry that cannot be made is left out with a warning.

    Args:
        handle: The run.
        log: The logger of the step.
    """

    def part(what: str, make: Callable[[], _Entries]) -> _Entries:
        return attempt(log, what, make, {})

    rows: list[dict[str, Any]] = attempt(log, "the table of reports", lambda: reports.rows_of(handle.events()), [])
    # The table is long, so it comes last.
    return {
        **part("the description of the run", lambda: _describe_end(handle)),
        **part("the throughput", lambda: _describe_speed(rows)),
        **part("the loss curve", lambda: _draw_losses(rows)),
        **part("the description of the result", lambda: describe_result(handle.result_ref())),
        **part("the table of reports", lambda: _list_reports(rows)),
    }


def _describe_end(handle: "RunHandle[Any]") -> _Entries:
    status = handle.status()
    entries: _Entries = {
        "run_directory": dg.MetadataValue.path(handle.directory),
        "run_id": dg.MetadataValue.text(handle.id),
        "report": dg.MetadataValue.path(f"{handle.directory}/{REPORT_FILE}"),
        "world_size": dg.MetadataValue.int(handle.world_size),
    }
    if status.started is not None and status.ended is not None:
        entries["duration_seconds"] = dg.MetadataValue.float(round(status.ended - status.started, 3))
    if status.engine_url:
        entries["spark_ui"] = dg.MetadataValue.url(status.engine_url)
    for name, value in status.metrics.items():
        entries[METRIC_PREFIX + name] = _describe_metric(value)
    return entries


def _describe_speed(rows: Sequence[dict[str, Any]]) -> _Entries:
    return {name: dg.MetadataValue.float(value) for name, value in reports.throughput(rows).items()}


def describe_result(ref: "ResultRef") -> _Entries:
    """Returns the entries of a stored value, the same for a run's result and for an IO manager's file."""
    algorithm, digits = split(ref.digest)
    entries: _Entries = {
        "format": dg.MetadataValue.text(ref.format),
        "size": dg.MetadataValue.int(ref.size),
        algorithm: dg.MetadataValue.text(digits),
    }
    if isinstance(ref.summary.get("parameters"), int):
        entries["parameters"] = dg.MetadataValue.int(ref.summary["parameters"])
    if ref.summary.get("dtypes"):
        entries["dtypes"] = table([{"dtype": name, **counts} for name, counts in ref.summary["dtypes"].items()])
    for name, value in ref.summary.get("metrics", {}).items():
        entries[METRIC_PREFIX + name] = _describe_metric(value)
    return entries


def describe_partitions(stored: "Mapping[str, ResultRef]") -> _Entries:
    """Returns the entries of an output of several partitions, the same for each of them.

    Dagster stores them with the event of each partition, so the table has at most `TABLE_ROWS` partitions.
    """
    rows = [
        {"partition": key, "format": ref.format, "size": ref.size, "digest": ref.digest}
        for key, ref in sorted(stored.items())[:TABLE_ROWS]
    ]
    return {
        "partitions": table(rows),
        "partition_count": dg.MetadataValue.int(len(stored)),
        "size": dg.MetadataValue.int(sum(ref.size for ref in stored.values())),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> dg.MetadataValue[Any]:
    """Returns a table for the UI with all columns of the rows, in the order of their first use."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = [dg.TableColumn(name, _column_type([row.get(name) for row in rows])) for name in names]
    records = [dg.TableRecord({name: _plain(row.get(name)) for name in names}) for row in rows]
    return dg.MetadataValue.table(records, dg.TableSchema(columns))


def _list_reports(rows: Sequence[dict[str, Any]]) -> _Entries:
    if not rows:
        return {}
    shown = rows[-1:] if len(rows) == 1 else curves.evenly(rows, TABLE_ROWS)
    hidden = reports.UNSHOWN
    return {"reports": table([{name: value for name, value in row.items() if name not in hidden} for row in shown])}


def _draw_losses(rows: Sequence[dict[str, Any]]) -> _Entries:
    picture = curves.chart(rows, curves.loss_names(rows))
    return {"loss_curve": dg.MetadataValue.md(picture)} if picture else {}


def _describe_metric(value: bool | int | float | str) -> dg.MetadataValue[Any]:
    if isinstance(value, bool):
        return dg.MetadataValue.bool(value)
    if isinstance(value, int):
        return dg.MetadataValue.int(value)
    if isinstance(value, float) and math.isfinite(value):
        return dg.MetadataValue.float(value)
    # JSON has no NaN and no infinity, and neither has the UI.
    return dg.MetadataValue.text(str(value))


def _column_type(values: Sequence[object]) -> str:
    present = [value for value in values if value is not None]
    if present and all(isinstance(value, bool) for value in present):
        return "bool"
    if all(is_number(value) for value in present):
        return "int" if all(isinstance(value, int) for value in present) else "float"
    return "string"


def _plain(value: Any) -> str | int | float | bool | None:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if not is_number(value):
        return str(value)
    # Large numbers, such as times, keep all digits before the point.
    return float(f"{value:.{TABLE_DIGITS}g}") if abs(value) < 10 ** (TABLE_DIGITS - 2) else float(value)


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
