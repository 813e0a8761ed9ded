"""The output of a step: the event with which it delivers the result of a training, and the metadata for the UI."""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_rankzero._compat import OutputFacts, io_manager_of, outputs_of
from dagster_rankzero.inputs import keys_of, wants_reference
from rankzero.pipeline import attempt, curves, reports

if TYPE_CHECKING:
    from rankzero import RankZeroError, ResultRef, RunHandle

logger = logging.getLogger(__name__)

_Entries = dict[str, Any]
# Dagster shows plain values as they are.

METRIC_PREFIX = "metric/"
"""Prefix of metrics' names, so that a metric cannot replace another entry."""

RESULT_ENTRIES = frozenset({"format", "size", "sha256"})
"""Names of the entries of `describe_result` other than metrics."""

TABLE_ROWS = 50
"""Most rows of the tables of reports and of partitions."""


def describe_run(handle: "RunHandle[Any]", log: Any = logger) -> _Entries:
    """Returns the entries of a run that has succeeded; one that cannot be made is left out with a warning."""

    def part(what: str, make: Callable[[], _Entries]) -> _Entries:
        return attempt(log, what, make, {})

    def losses() -> _Entries:
        picture = curves.chart(rows, curves.loss_names(rows))
        return {"loss_curve": dg.MetadataValue.md(picture)} if picture else {}

    rows: list[dict[str, Any]] = attempt(log, "the table of reports", lambda: reports.rows_of(handle.events()), [])
    # The table is long, so it comes last.
    return {
        **part("the description of the run", lambda: _describe_end(handle)),
        **part("the throughput", lambda: dict(reports.throughput(rows))),
        **part("the loss curve", losses),
        **part("the description of the result", lambda: describe_result(handle.result_ref())),
        **part("the table of reports", lambda: _list_reports(rows)),
    }


def _describe_end(handle: "RunHandle[Any]") -> _Entries:
    status = handle.status()
    entries: _Entries = {
        "run_directory": dg.MetadataValue.path(handle.directory),
        "run_id": handle.id,
        "report": dg.MetadataValue.path(f"{handle.directory}/report.html"),
        "world_size": handle.world_size,
    }
    if status.started is not None and status.ended is not None:
        entries["duration_seconds"] = round(status.ended - status.started, 3)
    if status.engine_url:
        entries["spark_ui"] = dg.MetadataValue.url(status.engine_url)
    return entries | _metrics(status.metrics)


def describe_result(ref: "ResultRef", directory: str = "") -> _Entries:
    """Returns the entries of a stored value, the same for a run's result and for an IO manager's file."""
    algorithm, _, digits = ref.digest.rpartition(":")
    entries: _Entries = {"path": dg.MetadataValue.path(directory)} if directory else {}
    entries |= {"format": ref.format, "size": ref.size, algorithm: digits}
    return entries | _metrics(ref.summary.get("metrics", {}))


def _metrics(values: Mapping[str, Any]) -> _Entries:
    # JSON has no NaN and no infinity, and neither has the UI.
    plain = {
        name: value if isinstance(value, int) or reports.is_number(value) else str(value)
        for name, value in values.items()
    }
    return {METRIC_PREFIX + name: value for name, value in plain.items()}


def describe_partitions(stored: "Mapping[str, ResultRef]") -> _Entries:
    """Returns the entries of an output of several partitions, which Dagster stores with the event of each."""
    rows = [
        {"partition": key, "format": ref.format, "size": ref.size, "digest": ref.digest}
        for key, ref in sorted(stored.items())[:TABLE_ROWS]
    ]
    size = sum(ref.size for ref in stored.values())
    return {"partitions": table(rows), "partition_count": len(stored), "size": size}


def describe_error(error: "RankZeroError") -> dict[str, Any]:
    """Returns the facts of an error by name."""
    from rankzero import HangError, InsufficientSlotsError, StartTimeoutError, WorkerFailedError

    facts: dict[str, Any] = {}
    if isinstance(error, WorkerFailedError):
        facts = {name: getattr(error, name) for name in ("rank", "host", "exception_type", "signal", "exit_code")}
        texts = {"traceback": error.traceback, "log_tail": error.log_tail, "other_ranks": error.others}
        for name, text in texts.items():
            if text:
                facts[name] = dg.MetadataValue.md(_fence(text if isinstance(text, str) else "\n".join(text)))
    elif isinstance(error, HangError):
        facts["missing_ranks"] = ", ".join(map(str, error.missing or ()))
        if error.stacks:
            blocks = [f"**rank {rank}**\n\n{_fence(stack)}" for rank, stack in error.stacks.items()]
            facts["stacks"] = dg.MetadataValue.md("\n\n".join(blocks))
    elif isinstance(error, InsufficientSlotsError):
        facts = {"slots_needed": error.needed, "slots_available": error.available}
    elif isinstance(error, StartTimeoutError):
        facts["missing"] = ", ".join(error.missing or ())
    return {name: fact for name, fact in facts.items() if fact not in (None, "")}


def _fence(text: str) -> str:
    # The fence must be longer than any in the text.
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(4, longest + 1)
    return f"{fence}text\n{text.rstrip()}\n{fence}"


def table(rows: Sequence[Mapping[str, Any]]) -> dg.MetadataValue[Any]:
    """Returns a table for the UI with all columns of the rows, in the order of their first use."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return dg.MetadataValue.table([dg.TableRecord({name: _plain(row.get(name)) for name in names}) for row in rows])


def _list_reports(rows: Sequence[dict[str, Any]]) -> _Entries:
    if not rows:
        return {}
    shown = rows[-1:] if len(rows) == 1 else curves.evenly(rows, TABLE_ROWS)
    hidden = reports.UNSHOWN
    return {"reports": table([{name: value for name, value in row.items() if name not in hidden} for row in shown])}


def _plain(value: Any) -> str | int | float | bool | None:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    # Twelve digits are enough for a time; the run directory has all.
    return float(f"{value:.12g}") if reports.is_number(value) else str(value)


def observe(context: Any, metrics: Mapping[str, Any]) -> Iterator[dg.AssetObservation]:
    """Yields an observation of every asset that a step materializes, under the names of the materialization."""
    numbers = {METRIC_PREFIX + name: value for name, value in metrics.items() if reports.is_number(value)}
    if numbers and isinstance(context, dg.AssetExecutionContext):
        partition = context.partition_key if context.has_partition_key else None
        for key in sorted(output.asset_key for output in outputs_of(context) if output.asset_key):
            yield dg.AssetObservation(asset_key=key, partition=partition, metadata=numbers)


def check_single(context: Any) -> None:
    """Raises dagster.Failure before a training whose step makes several assets, also if only one is selected."""
    specs = context.assets_def.specs if isinstance(context, dg.AssetExecutionContext) and outputs_of(context) else ()
    if len(keys := [spec.key for spec in specs]) > 1:
        raise dg.Failure(
            f"the step makes the assets {', '.join(sorted(key.to_user_string() for key in keys))}, and a training has "
            "one result: use torch_multi_asset, which gives each asset its part of what rank 0 returns; or "
            "run(context.op_execution_context, ...), which returns an Output, and make the results of its value",
            allow_retries=False,
        )


def single_output(context: Any) -> OutputFacts | None:
    """Returns the only output of a context's step; None if it has several, and outside of a step."""
    outputs = outputs_of(context)
    return outputs[0] if len(outputs) == 1 else None


def takes_reference(context: Any, output: OutputFacts | None) -> bool:
    """Returns True if an output is stored by reference: `RankZeroIOManager` stores the file without loading the value.

    An output needs the value if Dagster checks its type, if it has several partitions, or if it is dynamic.
    """
    if output is None or output.is_dynamic:
        return False
    if output.dagster_type.is_nothing:
        # An output of type Nothing passes no value on.
        return True
    if not (output.dagster_type.is_any or wants_reference(output.dagster_type)) or len(keys_of(context)) > 1:
        return False
    return getattr(io_manager_of(context, output.name), "takes_references", False)


def build_result(context: Any, handle: "RunHandle[Any]", value: Any, output: OutputFacts | None) -> Any:
    """Returns a `dagster.MaterializeResult` for an asset, else a `dagster.Output`; without a value for type Nothing."""
    metadata = describe_run(handle, context.log)
    takes_nothing = output is not None and output.dagster_type.is_nothing
    if not isinstance(context, dg.AssetExecutionContext):
        return dg.Output(None if takes_nothing else value, metadata=metadata)
    key = output.asset_key if output else None
    if takes_nothing:
        return dg.MaterializeResult(asset_key=key, metadata=metadata)
    version = dg.DataVersion(handle.result_ref().digest.rpartition(":")[2])
    return dg.MaterializeResult(asset_key=key, value=value, metadata=metadata, data_version=version)


def by_output(function: str, value: Any, names: list[str], required: set[str]) -> dict[str, Any]:
    """Returns rank 0's value by output name; raises dagster.Failure if an output is missing or unknown."""
    if isinstance(value, tuple) and set(getattr(value, "_fields", ())) == set(names):
        return dict(zip(value._fields, value, strict=True))  # type: ignore[attr-defined]
    if isinstance(value, tuple) and len(value) == len(names):
        return dict(zip(names, value, strict=True))
    if isinstance(value, dict) and required <= set(value) <= set(names):
        return value
    got = f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"
    if isinstance(value, dict):
        got = f"a dict with the keys {', '.join(sorted(map(str, value)))}"
    raise dg.Failure(
        f"{function} returned {got}; return a dict with the keys {', '.join(names)}, or a tuple in this order, and "
        "re-execute the whole step: from the failure it would get the same value again",
        allow_retries=False,
    )
