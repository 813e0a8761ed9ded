"""`torch_multi_asset`: one training, several assets, such as a model, its metrics and its predictions."""

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg

from dagster_rankzero._compat import set_step_data_version
from dagster_rankzero.arguments.partitions import of_single
from dagster_rankzero.decorators.compute import build_compute, check_result, collect_options, with_resource
from dagster_rankzero.metadata import RESULT_ENTRIES
from dagster_rankzero.output import by_output
from dagster_rankzero.resource import DEFAULT_RESOURCE_KEY
from rankzero.pipeline import NumProcesses


def torch_multi_asset(
    *,
    outs: Mapping[str, dg.AssetOut],
    num_processes: NumProcesses | None = None,
    use_gpu: bool | None = None,
    options: Mapping[str, Any] | None = None,
    resource_key: str = DEFAULT_RESOURCE_KEY,
    **asset_arguments: Any,
) -> Callable[[Callable[..., Any]], dg.AssetsDefinition]:
    """Makes several assets of a function that runs on every rank; rank 0 returns their values together.

    Rank 0 returns a dict by output name, a NamedTuple of those names, or a tuple in the order of ``outs``. Each value
    goes to the IO manager of its output and has its own data version. With `RankZeroIOManager` that is its checksum,
    so that new metrics of an unchanged model do not make dependents of the model stale. The step's process
    loads the values; make a separate asset of a model that is too large for it (`torch_asset`).

    An output with ``is_required=False`` may be left out of the dict, and is then not materialized.
    With ``can_subset=True`` the whole training runs, and only the selected assets are stored.

    Args:
        outs: The assets by output name. ``specs`` cannot be used, since their outputs carry no value.
        num_processes: World size, the smallest and the largest, or ``"auto"``; None: the resource's.
        use_gpu: Whether every rank gets a GPU; None: the resource's value.
        options: More changes to the resource, by its field names.
        resource_key: Key of the `TorchDistributorResource`.
        asset_arguments: All other arguments of ``@dg.multi_asset``. Checks work as in `torch_asset`.

    Returns:
        A decorator that makes the assets.

    Raises:
        dagster.DagsterInvalidDefinitionError: a parameter or argument cannot be used.

    Example:
        >>> @torch_multi_asset(outs={"model": dg.AssetOut(), "metrics": dg.AssetOut()}, num_processes=2)
        ... def training(features):
        ...     return {"model": features, "metrics": {"loss": 0.1}}
        >>> sorted(key.to_user_string() for key in training.keys)
        ['metrics', 'model']
    """
    if "specs" in asset_arguments:
        raise dg.DagsterInvalidDefinitionError(
            "torch_multi_asset takes outs and not specs, whose outputs carry no value: AssetOut.from_spec(spec)"
        )
    changes = {**collect_options(options, num_processes=num_processes, use_gpu=use_gpu), "by_reference": False}
    required = {name for name, out in outs.items() if out.is_required}

    def decorate(function: Callable[..., Any]) -> dg.AssetsDefinition:
        if inspect.signature(function).return_annotation in (None, "None"):
            raise dg.DagsterInvalidDefinitionError(
                f"{function.__name__} is annotated -> None, but {', '.join(outs)} are made of what it returns"
            )

        def finish(context: dg.AssetExecutionContext, result: dg.MaterializeResult[Any], keys: list[str]) -> Any:
            values = by_output(function.__name__, result.value, list(outs), required)
            # A generator: Dagster would treat a tuple as all outputs, and an output may be left out.
            return (
                _result_of(context, name, of_single(values[name], keys, name), result)
                for name in outs
                if name in values and name in context.op_execution_context.selected_output_names
            )

        context = dg.AssetExecutionContext
        compute = build_compute("torch_multi_asset", function, resource_key, changes, context, asset_arguments, finish)
        may_miss = asset_arguments.get("can_subset")
        made = {name: _optional(out) if may_miss else out for name, out in outs.items()}
        return dg.multi_asset(**with_resource(asset_arguments, resource_key), outs=made)(compute)

    return decorate


def _result_of(
    context: dg.AssetExecutionContext, name: str, value: Any, whole: dg.MaterializeResult[Any]
) -> dg.MaterializeResult[Any]:
    key = context.asset_key_for_output(name)
    if whole.data_version is not None:
        # For IO managers without checksums; RankZeroIOManager replaces it by the value's checksum.
        set_step_data_version(context, key, whole.data_version)
    metadata = whole.metadata or {}
    return dg.MaterializeResult(
        asset_key=key,
        value=value,
        metadata={entry: shown for entry, shown in metadata.items() if entry not in RESULT_ENTRIES},
        check_results=[
            check_result(check, metadata)
            for check in sorted(context.selected_asset_check_keys)
            if check.asset_key == key
        ],
    )


def _optional(out: dg.AssetOut) -> dg.AssetOut:
    changed = copy.copy(out)
    changed.is_required = False
    return changed
