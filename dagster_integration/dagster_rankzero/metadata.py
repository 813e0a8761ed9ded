"""The output of a step: the event with which it delivers the result of a training, and the metadata for the UI."""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_rankzero._compat import OutputFacts, io_manager_of, outputs_of
from dagster_rankzero.inputs import keys_of, wants_reference
from rankzero.pipeline import attempt, curves, reports

if TYPE_CHECKING:
    from rankzero import RankZeroError, ResultRef, RunHandle

logger = logging.getLogger(__name__)

_Entries = dict[str, Any]  # Dagster shows plain values as they are

METRIC_PREFIX = "metric/"
"""Prefix of metrics' names, so that a metric cannot replace another entry."""

RESULT_ENTRIES = frozenset({"format", "size", "sha256", "sha256-4m"})
"""Names of the entries of `describe_result` other than metrics."""


def describe_run(handle: "RunHandle[Any]", log: Any = logger) -> _Entries:
    """Returns the entries of a run that has succeeded; one that cannot be made is left out with a warning."""

    def part(what: str, make: Callable[[], _Entries]) -> _Entries:
        return attempt(log, what, make, {})

    def losses() -> _Entries:
        picture = curves.chart(rows, curves.loss_names(rows))
        return {"loss_curve": dg.MetadataValue.md(picture)} if picture else {}

    rows: list[dict[str, Any]] = attempt(log, "the reports", lambda: reports.rows_of(handle.events()), [])
    return {
        **part("the description of the run", lambda: _describe_end(handle)),
        **part("the throughput", lambda: dict(reports.throughput(rows))),
        **part("the loss curve", losses),
        **part("the description of the result", lambda: describe_result(handle.result_ref())),
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
    return {"partition_count": len(stored), "size": sum(ref.size for ref in stored.values())}


def describe_error(error: "RankZeroError") -> dict[str, Any]:
    """Returns the facts of an error by name."""
    from rankzero import HangError, WorkerFailedError

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
    return {name: fact for name, fact in facts.items() if fact not in (None, "")}


def _fence(text: str) -> str:
    # The fence must be longer than any in the text.
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(4, longest + 1)
    return f"{fence}text\n{text.rstrip()}\n{fence}"


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


def by_partition(value: Any, keys: list[str], name: str) -> dict[str, Any]:
    """Returns the value of every partition from an output; raises dagster.Failure unless it is a dict of those."""
    got = f"a {type(value).__name__}"
    if isinstance(value, Mapping):
        values = {str(key): item for key, item in value.items()}
        if values.keys() == set(keys):
            return values
        got = f"a dict with the keys {sorted(values)}"
    raise dg.Failure(
        f"a run of the partitions {', '.join(sorted(keys))} of {name} got {got}: "
        "return a dict with one value for each partition key, or use BackfillPolicy.multi_run(); then re-execute the "
        "whole step: from the failure it would get the same value again",
        allow_retries=False,
    )
