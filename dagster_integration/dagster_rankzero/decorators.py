"""`torch_asset`, `torch_multi_asset`, `torch_distributor_op`: assets and ops of functions that run on every rank."""

import copy
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import dagster as dg

from dagster_rankzero._compat import outputs_of
from dagster_rankzero.compute import (
    build_compute,
    build_script_compute,
    check_result,
    collect_options,
    with_reported_checks,
    with_resource,
)
from dagster_rankzero.inputs import of_single, take_single
from dagster_rankzero.metadata import RESULT_ENTRIES, by_output
from dagster_rankzero.resource import DEFAULT_RESOURCE_KEY
from rankzero.pipeline import NumProcesses


@overload
def torch_asset(train: Callable[..., Any], /) -> dg.AssetsDefinition: ...
@overload
def torch_asset(
    *,
    num_processes: NumProcesses | None = None,
    use_gpu: bool | None = None,
    options: Mapping[str, Any] | None = None,
    resource_key: str = DEFAULT_RESOURCE_KEY,
    **asset_arguments: Any,
) -> Callable[[Callable[..., Any]], dg.AssetsDefinition]: ...
def torch_asset(
    train: Callable[..., Any] | None = None,
    /,
    *,
    num_processes: NumProcesses | None = None,
    use_gpu: bool | None = None,
    options: Mapping[str, Any] | None = None,
    resource_key: str = DEFAULT_RESOURCE_KEY,
    **asset_arguments: Any,
) -> dg.AssetsDefinition | Callable[[Callable[..., Any]], dg.AssetsDefinition]:
    """Makes an asset of a function that runs on every rank; rank 0's return value is the asset's value.

    The function's parameters are the asset's inputs, as with ``@dg.asset``. An input from a
    `RankZeroIOManager` is opened inside the ranks and not loaded by the step. An input from another IO
    manager is loaded by the step and sent with the job. Three parameters are special:

    * ``config``, annotated with a `dagster.Config` class: the ranks get a plain namespace with the
      same attributes, since executors may not have Dagster installed.
    * ``partition_key``: the key of the partition, a string, ``"a|b"`` for two dimensions.
    * ``partition_keys``: the list of them, for `dagster.BackfillPolicy.single_run`; the function
      returns a dict with one value for each.

    The result of a check in ``check_specs`` is the value that rank 0 reports under its name:
    ``rankzero.train.report({"check/finite": True})``.

    Args:
        train: The function. It gets no Dagster context.
        num_processes: World size, the smallest and the largest, or ``"auto"``; None: the resource's.
        use_gpu: Whether every rank gets a GPU; None: the resource's value.
        options: More changes to the resource for this asset, by its field names.
        resource_key: Key of the `TorchDistributorResource`.
        asset_arguments: Everything that ``@dg.asset`` takes: ``ins``, ``deps``, ``partitions_def``,
            ``backfill_policy``, ``retry_policy``, ``pool``, ``op_tags``, ``kinds``, ``tags``, ``owners``,
            ``code_version``, ``check_specs``, ``automation_condition``, ``io_manager_key`` ...

    Returns:
        The asset, or a decorator that makes it.

    Raises:
        dagster.DagsterInvalidDefinitionError: a parameter or argument cannot be used.

    Example:
        >>> @torch_asset(num_processes=4, kinds={"pytorch"}, pool="gpu")
        ... def model(features):
        ...     import torch.distributed as dist
        ...     dist.init_process_group("gloo")
        ...     return {"rows": len(features)}
    """
    changes = collect_options(options, num_processes=num_processes, use_gpu=use_gpu)

    def decorate(function: Callable[..., Any]) -> dg.AssetsDefinition:
        finish = with_reported_checks if asset_arguments.get("check_specs") else take_single
        context = dg.AssetExecutionContext
        compute = build_compute("torch_asset", function, resource_key, changes, context, asset_arguments, finish)
        decorated = dg.asset(**with_resource(asset_arguments, resource_key))(compute)
        assert isinstance(decorated, dg.AssetsDefinition)
        return decorated

    return decorate if train is None else decorate(train)


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
        made = {name: copy.copy(out) for name, out in outs.items()}
        for out in made.values() if asset_arguments.get("can_subset") else ():
            out.is_required = False
        return dg.multi_asset(**with_resource(asset_arguments, resource_key), outs=made)(compute)

    return decorate


def _result_of(
    context: dg.AssetExecutionContext, name: str, value: Any, whole: dg.MaterializeResult[Any]
) -> dg.MaterializeResult[Any]:
    key = context.asset_key_for_output(name)
    if whole.data_version is not None:
        # For IO managers without checksums; RankZeroIOManager replaces it by the value's checksum.
        context.set_data_version(key, whole.data_version)
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


@overload
def torch_distributor_op(
    train: Callable[..., Any] | str | os.PathLike[str] | Sequence[str],
    /,
    *,
    args: Sequence[Any] = (),
    num_processes: NumProcesses | None = None,
    use_gpu: bool | None = None,
    options: Mapping[str, Any] | None = None,
    resource_key: str = DEFAULT_RESOURCE_KEY,
    **op_arguments: Any,
) -> dg.OpDefinition: ...
@overload
def torch_distributor_op(
    *,
    num_processes: NumProcesses | None = None,
    use_gpu: bool | None = None,
    options: Mapping[str, Any] | None = None,
    resource_key: str = DEFAULT_RESOURCE_KEY,
    **op_arguments: Any,
) -> Callable[[Callable[..., Any]], dg.OpDefinition]: ...
def torch_distributor_op(
    train: Callable[..., Any] | str | os.PathLike[str] | Sequence[str] | None = None,
    /,
    *,
    args: Sequence[Any] = (),
    num_processes: NumProcesses | None = None,
    use_gpu: bool | None = None,
    options: Mapping[str, Any] | None = None,
    resource_key: str = DEFAULT_RESOURCE_KEY,
    **op_arguments: Any,
) -> dg.OpDefinition | Callable[[Callable[..., Any]], dg.OpDefinition]:
    """Makes an op that runs a function or a script on every rank; its output is rank 0's value.

    With several outputs, rank 0 returns a dict by output name, or a tuple in the order of ``out``; outputs of type
    Nothing have no part in either.
    A function's parameters are the op's inputs, except ``config`` and ``partition_key``, which are special as in
    `torch_asset`. A script has no inputs; order it with ``ins={"start": In(Nothing)}``.

    Args:
        train: A function, ``"path/to/script.py"`` (relative to the calling file, else to the working directory),
            ``"package.module:function"``, ``"-m package.module"``, or a command as a list of words.
        args: The rest of the command line, or the arguments of ``"package.module:function"``.
        num_processes: World size, the smallest and the largest, or ``"auto"``; None: the resource's.
        use_gpu: Whether every rank gets a GPU; None: the resource's value.
        options: More changes to the resource for this op, by its field names.
        resource_key: Key of the `TorchDistributorResource`.
        op_arguments: All arguments of ``@dg.op``: ``name``, ``ins``, ``out``, ``tags``,
            ``retry_policy``, ``pool`` ...

    Returns:
        The op, or a decorator that makes it.

    Raises:
        dagster.DagsterInvalidDefinitionError: a parameter or argument cannot be used.

    Example:
        >>> train_op = torch_distributor_op("train.py", args=["--epochs", "3"], num_processes=2)
        >>> train_op.name
        'train'
    """
    changes = collect_options(options, num_processes=num_processes, use_gpu=use_gpu)
    outs = op_arguments.get("out")
    declared = [*outs.values()] if isinstance(outs, Mapping) else [outs]
    if any(isinstance(out, dg.DynamicOut) for out in declared):
        raise dg.DagsterInvalidDefinitionError(
            "torch_distributor_op makes no dynamic outputs: return a list, and yield its items as DynamicOutput from "
            "an op that takes it"
        )
    has_several = len(declared) > 1
    if has_several:
        changes["by_reference"] = False

    def finish(context: dg.OpExecutionContext, result: dg.Output[Any], keys: list[str]) -> Any:
        if not has_several:
            return take_single(context, result, keys)
        outputs = [output for output in context.op_def.output_defs if not output.dagster_type.is_nothing]
        names = [output.name for output in outputs]
        required = {output.name for output in outputs if output.is_required}
        values = by_output(context.op_def.name, result.value, names, required)
        # Outside of a step, as when the op is called directly, there is no selection.
        selected = {output.name for output in outputs_of(context)} or set(names)
        metadata = {entry: shown for entry, shown in result.metadata.items() if entry not in RESULT_ENTRIES}
        # A generator: Dagster would treat a tuple as all outputs, and an output may be left out.
        return (
            dg.Output(of_single(values[name], keys, name), name, metadata=metadata)
            for name in names
            if name in values and name in selected
        )

    def make(compute: Callable[..., Any]) -> dg.OpDefinition:
        made = dg.op(**with_resource(op_arguments, resource_key))(compute)
        assert isinstance(made, dg.OpDefinition)
        return made

    def decorate(function: Callable[..., Any]) -> dg.OpDefinition:
        context = dg.OpExecutionContext
        compute = build_compute("torch_distributor_op", function, resource_key, changes, context, op_arguments, finish)
        if args:
            raise dg.DagsterInvalidDefinitionError(
                f"args={list(args)!r} is for scripts; the arguments of {function.__name__} are the op's inputs"
            )
        return make(compute)

    if train is None:
        return decorate
    if isinstance(train, (str, os.PathLike, list, tuple)):
        caller = sys._getframe(1).f_globals.get("__file__", "")
        return make(build_script_compute(train, tuple(args), resource_key, changes, os.path.dirname(caller), finish))
    assert callable(train)
    return decorate(train)
