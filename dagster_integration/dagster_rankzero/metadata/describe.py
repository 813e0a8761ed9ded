"""What Dagster's UI shows of a run and of a stored result."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_rankzero.metadata import curve

if TYPE_CHECKING:
    from rankzero import ResultRef, RunHandle

METRIC_PREFIX = "metric/"
"""Before a metric's own name, so that none can hide another entry."""

RESULT_ENTRIES = frozenset({"format", "size", "sha256", "parameters", "dtypes"})
"""What `describe_result` says of the file, apart from metrics."""

TABLE_ROWS = 50
"""Rows of the table of reports."""

CURVE_POINTS = 200
"""Points of the loss curve, and most reports that are kept in memory, twice over."""

PROGRESS = {"samples": "samples", "tokens": "tokens", "step": "steps", "epoch": "epochs"}
"""Metrics that count work done, and many of it: the first that was reported gives the throughput."""

TABLE_DIGITS = 9
"""Digits of a fraction in a table; the run directory has them all."""


def describe_run(handle: "RunHandle[Any]") -> dict[str, dg.MetadataValue[Any]]:
    """The entries of a run that has succeeded: where, how long, how fast, its reports, and its result."""
    status = handle.status()
    entries: dict[str, dg.MetadataValue[Any]] = {
        "run_directory": dg.MetadataValue.path(handle.directory),
        "world_size": dg.MetadataValue.int(handle.world_size),
    }
    if status.started is not None and status.ended is not None:
        entries["duration_seconds"] = dg.MetadataValue.float(round(status.ended - status.started, 3))
    if status.engine_url:
        entries["spark_ui"] = dg.MetadataValue.url(status.engine_url)
    for name, value in status.metrics.items():
        entries[METRIC_PREFIX + name] = _describe_metric(value)
    rows = _thin(_reports_of_rank_zero(handle))
    # The table comes last: it is long.
    return {
        **entries,
        **_describe_throughput(rows),
        **_draw_losses(rows),
        **describe_result(handle.result_ref()),
        **_list_reports(rows),
    }


def describe_result(ref: "ResultRef") -> dict[str, dg.MetadataValue[Any]]:
    """The entries of a stored value, the same for a run's result and for an IO manager's file."""
    entries: dict[str, dg.MetadataValue[Any]] = {
        "format": dg.MetadataValue.text(ref.format),
        "size": dg.MetadataValue.int(ref.size),
        "sha256": dg.MetadataValue.text(ref.sha256),
    }
    if isinstance(ref.summary.get("parameters"), int):
        entries["parameters"] = dg.MetadataValue.int(ref.summary["parameters"])
    if ref.summary.get("dtypes"):
        entries["dtypes"] = table([{"dtype": name, **counts} for name, counts in ref.summary["dtypes"].items()])
    for name, value in ref.summary.get("metrics", {}).items():
        entries[METRIC_PREFIX + name] = _describe_metric(value)
    return entries


def describe_partitions(stored: "Mapping[str, ResultRef]") -> dict[str, dg.MetadataValue[Any]]:
    """The entries of an output of several partitions, the same for each of them."""
    rows = [
        {"partition": key, "format": ref.format, "size": ref.size, "sha256": ref.sha256}
        for key, ref in sorted(stored.items())
    ]
    return {"partitions": table(rows), "size": dg.MetadataValue.int(sum(ref.size for ref in stored.values()))}


def table(rows: Sequence[Mapping[str, Any]]) -> dg.MetadataValue[Any]:
    """A table as the UI shows it; its columns are those of the rows, in the order in which they come up."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = [dg.TableColumn(name, _column_type([row.get(name) for row in rows])) for name in names]
    records = [dg.TableRecord({name: _plain(row.get(name)) for name in names}) for row in rows]
    return dg.MetadataValue.table(records, dg.TableSchema(columns))


def _list_reports(rows: Sequence[dict[str, Any]]) -> dict[str, dg.MetadataValue[Any]]:
    if not rows:
        return {}
    shown = rows[-1:] if len(rows) == 1 else _evenly(rows, TABLE_ROWS)
    return {"reports": table([{name: value for name, value in row.items() if name != "time"} for row in shown])}


def _draw_losses(rows: Sequence[dict[str, Any]]) -> dict[str, dg.MetadataValue[Any]]:
    losses = [name for name in dict.fromkeys(name for row in rows for name in row) if "loss" in name.lower()]
    picture = curve.draw(_evenly(rows, CURVE_POINTS), losses)
    return {"loss_curve": dg.MetadataValue.md(picture)} if picture else {}


def _reports_of_rank_zero(handle: "RunHandle[Any]") -> Iterator[dict[str, Any]]:
    number = 0
    for event in handle.events():
        if event["type"] == "metric" and event["rank"] == 0:
            number += 1
            # A metric of the same name gives way.
            yield {"report": number} | event["metrics"] | {"report": number, "time": event["time"]}


def _thin(rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every n-th row and the last one, however many there are: a long training must not fill the step's memory."""
    kept: list[dict[str, Any]] = []
    every, last = 1, None
    for number, row in enumerate(rows):
        last = row
        if number % every == 0:
            kept.append(row)
            if len(kept) > 2 * CURVE_POINTS:
                kept, every = kept[::2], every * 2
    if last is not None and kept[-1] is not last:
        kept.append(last)
    return kept


def _evenly(rows: Sequence[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """At most ``limit`` of the rows, the first and the last among them."""
    if len(rows) <= limit:
        return list(rows)
    return [rows[round(index * (len(rows) - 1) / (limit - 1))] for index in range(limit)]


def _describe_throughput(rows: Sequence[dict[str, Any]]) -> dict[str, dg.MetadataValue[Any]]:
    for name, many in PROGRESS.items():
        counted = [row for row in rows if is_number(row.get(name))]
        if len(counted) > 1:
            done, seconds = counted[-1][name] - counted[0][name], counted[-1]["time"] - counted[0]["time"]
            if done > 0 and seconds > 0:
                return {f"{many}_per_second": dg.MetadataValue.float(float(f"{done / seconds:.4g}"))}
    return {}


def _describe_metric(value: bool | int | float | str) -> dg.MetadataValue[Any]:
    if isinstance(value, bool):
        return dg.MetadataValue.bool(value)
    if isinstance(value, int):
        return dg.MetadataValue.int(value)
    if isinstance(value, float) and math.isfinite(value):
        return dg.MetadataValue.float(value)
    # JSON has no NaN and no infinity, and neither has the UI.
    return dg.MetadataValue.text(str(value))


def is_number(value: object) -> bool:
    """True for what Dagster can plot: a finite number that is no truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


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
    # Large ones, such as times, keep what is before the point.
    return float(f"{value:.{TABLE_DIGITS}g}") if abs(value) < 10 ** (TABLE_DIGITS - 2) else float(value)
