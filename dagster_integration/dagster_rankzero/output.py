"""Builds the event with which a step delivers the result of its training to Dagster, for a single asset or output."""

from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_rankzero._compat import OutputFacts, expect_single_result, io_manager_of, outputs_of
from dagster_rankzero.arguments.inputs import wants_reference
from dagster_rankzero.arguments.partitions import keys_of
from rankzero.pipeline import split

if TYPE_CHECKING:
    from rankzero import RunHandle


def check_single(context: Any) -> None:
    """Checks before a training that its step makes at most one asset.

    Raises:
        dagster.Failure: the step makes several assets, or the context is that of a hook. Not retried.
    """
    if isinstance(context, dg.HookContext):
        raise dg.Failure(
            "a hook cannot train: its context has neither partitions nor outputs, and no retry of its own. Train in an "
            "op or asset that comes after the step",
            allow_retries=False,
        )
    if not isinstance(context, dg.AssetExecutionContext):
        return
    keys = [output.asset_key.to_user_string() for output in outputs_of(context) if output.asset_key]
    if len(keys) > 1:
        raise dg.Failure(
            f"the step makes the assets {', '.join(keys)}, and a training has one result: use torch_multi_asset, "
            "which gives each asset its part of what rank 0 returns; or run(context.op_execution_context, ...), which "
            "returns an Output, and make the results of its value",
            allow_retries=False,
        )
    expect_single_result(context)


def single_output(context: Any) -> OutputFacts | None:
    """Returns the only output of a context's step; None if it has several, and outside of a step."""
    outputs = outputs_of(context)
    return outputs[0] if len(outputs) == 1 else None


def value_of(context: Any, handle: "RunHandle[Any]", output: OutputFacts | None, by_reference: bool | None) -> Any:
    """Returns rank 0's value, or its `ResultRef` without loading the value.

    Args:
        context: Context of the step.
        handle: A run that has succeeded.
        output: Output of the step, if it has a single one.
        by_reference: Whether to return the `ResultRef`; None: if the output is stored by reference.
    """
    is_reference = takes_reference(context, output) if by_reference is None else by_reference
    return handle.result_ref() if is_reference else handle.result()


def takes_reference(context: Any, output: OutputFacts | None) -> bool:
    """Returns True if an output is stored by reference: `RankZeroIOManager` stores the file without loading the value.

    An output needs the value if Dagster checks its type, if it has several partitions, or if it is dynamic.
    """
    from dagster_rankzero.io_manager.io_manager import RankZeroIOManager

    if output is None or output.is_dynamic:
        return False
    dagster_type = output.dagster_type
    if dagster_type.is_nothing:
        # An output of type Nothing passes no value on.
        return True
    if not (dagster_type.is_any or wants_reference(dagster_type)) or len(keys_of(context)) > 1:
        return False
    return isinstance(io_manager_of(context, output.name), RankZeroIOManager)


def build_result(context: Any, handle: "RunHandle[Any]", value: Any, output: OutputFacts | None) -> Any:
    """Returns the event for a training that has succeeded.

    Args:
        context: Context of the step.
        handle: The run.
        value: Rank 0's value, or its handle.
        output: Output of the step, if it has a single one. An output of type Nothing gets only the metadata.

    Returns:
        A `dagster.MaterializeResult` for the context of an asset, else a `dagster.Output`.
    """
    from dagster_rankzero.metadata import describe_run

    metadata = describe_run(handle, context.log)
    takes_nothing = output is not None and output.dagster_type.is_nothing
    if not isinstance(context, dg.AssetExecutionContext):
        return dg.Output(None if takes_nothing else value, metadata=metadata)
    key = output.asset_key if output else None
    if takes_nothing:
        return dg.MaterializeResult(asset_key=key, metadata=metadata)
    version = dg.DataVersion(split(handle.result_ref().digest)[1])
    return dg.MaterializeResult(asset_key=key, value=value, metadata=metadata, data_version=version)


def by_output(function: str, value: Any, names: list[str], required: set[str]) -> dict[str, Any]:
    """Returns rank 0's value by output name.

    Raises:
        dagster.Failure: an output is missing or unknown. Not retried.
    """
    if isinstance(value, tuple) and set(getattr(value, "_fields", ())) == set(names):
        return dict(zip(value._fields, value, strict=True))  # type: ignore[attr-defined]
    if isinstance(value, tuple) and len(value) == len(names):
        return dict(zip(names, value, strict=True))
    if isinstance(value, dict) and required <= set(value) <= set(names):
        return value
    got = f"a {type(value).__name__}"
    if isinstance(value, dict):
        got = f"a dict with the keys {', '.join(sorted(map(str, value)))}"
    elif isinstance(value, tuple):
        got = f"a tuple of {len(value)}"
    raise dg.Failure(
        f"{function} returned {got}; return a dict with the keys {', '.join(names)}, or a tuple in this order, and "
        "re-execute the whole step: from the failure it would get the same value again",
        allow_retries=False,
    )
