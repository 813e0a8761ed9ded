"""`torch_distributor_op`: an op whose function or script runs on every rank."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import dagster as dg

from dagster_rankzero._compat import outputs_of
from dagster_rankzero.arguments.partitions import of_single, take_single
from dagster_rankzero.decorators.compute import build_compute, build_script_compute, collect_options, with_resource
from dagster_rankzero.metadata import RESULT_ENTRIES
from dagster_rankzero.output import by_output
from dagster_rankzero.resource import DEFAULT_RESOURCE_KEY
from rankzero.pipeline import NumProcesses


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
