"""`torch_asset`, `torch_multi_asset`, `torch_distributor_op`: assets and ops of functions that run on every rank."""

import copy
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast, overload

import dagster as dg
from pydantic import ValidationError

from dagster_rankzero._compat import name_of, with_partitions
from dagster_rankzero.checks import reported_checks
from dagster_rankzero.inputs import PARTITION_KEYS, PartitionArguments, check_function, ins_of, step_parameters
from dagster_rankzero.metadata import RESULT_ENTRIES, by_partition
from dagster_rankzero.resource import DEFAULT_RESOURCE_KEY, NumProcesses, Program, TorchDistributorResource

_Finish = Callable[[Any, Any, list[str]], Any]
# Makes a step's return value from its context, the result of its training, and the `partition_keys` that it got.


@overload
def torch_asset(train: Callable[..., Any], /) -> dg.AssetsDefinition: ...
@overload
def torch_asset(
    *, num_processes: NumProcesses | None = None, **arguments: Any
) -> Callable[[Callable[..., Any]], dg.AssetsDefinition]: ...
def torch_asset(
    train: Callable[..., Any] | None = None,
    /,
    *,
    num_processes: NumProcesses | None = None,
    options: Mapping[str, Any] | None = None,
    resource_key: str = DEFAULT_RESOURCE_KEY,
    **asset_arguments: Any,
) -> dg.AssetsDefinition | Callable[[Callable[..., Any]], dg.AssetsDefinition]:
    """Makes an asset of a function that runs on every rank; rank 0's return value is the asset's value.

    The function's parameters are the asset's inputs, as with ``@dg.asset``. An input from a `RankZeroIOManager` is
    opened inside the ranks and not loaded by the step. An input from another IO manager is loaded by the step and sent
    with the job; a Spark DataFrame is a dataset, whose name the ranks get: ``rt.get_dataset_shard(features)``. Three
    parameters are special:

    * ``config``, annotated with a `dagster.Config` class: the ranks get a plain namespace with the
      same attributes, since executors may not have Dagster installed.
    * ``partition_key``: the key of the partition, a string, ``"a|b"`` for two dimensions.
    * ``partition_keys``: the list of them, for `dagster.BackfillPolicy.single_run`; the function
      returns a dict with one value for each.

    The result of a check in ``check_specs`` is the value that rank 0 reports under its name:
    ``rankzero.train.report({"check/finite": True})``, or ``"check/finite/KEY"`` for each of several partitions.

    Args:
        train: The function. It gets no Dagster context.
        num_processes: World size, the smallest and the largest, or ``"auto"``; None: the resource's.
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
    changes = collect_changes(options, num_processes=num_processes)

    def decorate(function: Callable[..., Any]) -> dg.AssetsDefinition:
        return build_asset(function, changes, resource_key, asset_arguments)

    return decorate if train is None else decorate(train)


def build_asset(
    train: Callable[..., Any],
    changes: Mapping[str, Any],
    resource_key: str,
    asset_arguments: Mapping[str, Any],
    fixed: Mapping[str, Any] | None = None,
    inputs: Collection[str] | None = None,
) -> dg.AssetsDefinition:
    """Builds the asset of a training function, some of whose arguments are fixed; ``inputs`` names its inputs."""
    arguments = _with_check_partitions(asset_arguments)
    specs = arguments.get("check_specs")

    def finish(context: dg.AssetExecutionContext, result: dg.MaterializeResult[Any], keys: list[str]) -> Any:
        single = _take_single(context, result, keys)
        return _with_checks(context, [single], specs, result.metadata) if specs else single

    made = _make(dg.asset, train, changes, resource_key, arguments, finish, fixed, inputs)
    assert isinstance(made, dg.AssetsDefinition)
    return made


def torch_multi_asset(
    *,
    outs: Mapping[str, dg.AssetOut],
    num_processes: NumProcesses | None = None,
    options: Mapping[str, Any] | None = None,
    resource_key: str = DEFAULT_RESOURCE_KEY,
    **asset_arguments: Any,
) -> Callable[[Callable[..., Any]], dg.AssetsDefinition]:
    """Makes several assets of a function that runs on every rank; rank 0 returns their values together.

    Rank 0 returns a dict by output name, a NamedTuple of those names, or a tuple in the order of ``outs``. Each value
    goes to the IO manager of its output and has its own data version. The step's process loads the values; make a
    separate asset of a model that is too large for it (`torch_asset`).

    An output with ``is_required=False`` may be left out of the dict, and is then not materialized.
    With ``can_subset=True`` the whole training runs, and only the selected assets are stored.

    Args:
        outs: The assets by output name.
        num_processes: As for `torch_asset`.
        options: As for `torch_asset`.
        resource_key: As for `torch_asset`.
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
    changes = {**collect_changes(options, num_processes=num_processes), "by_reference": False}
    arguments = _with_check_partitions(asset_arguments)
    required = {name for name, out in outs.items() if out.is_required}

    def decorate(function: Callable[..., Any]) -> dg.AssetsDefinition:
        def finish(context: dg.AssetExecutionContext, result: dg.MaterializeResult[Any], keys: list[str]) -> Any:
            values = _by_output(function.__name__, result.value, list(outs), required)
            selected = context.op_execution_context.selected_output_names
            metadata = _without_result(result.metadata)
            found = [
                dg.MaterializeResult(
                    asset_key=context.asset_key_for_output(name),
                    value=_of_single(values[name], keys, name),
                    metadata=metadata,
                )
                for name in outs
                if name in values and name in selected
            ]
            return _with_checks(context, found, arguments.get("check_specs") or (), result.metadata)

        made = {name: copy.copy(out) for name, out in outs.items()}
        for out in made.values() if arguments.get("can_subset") else ():
            out.is_required = False
        assets: dg.AssetsDefinition = _make(
            dg.multi_asset, function, changes, resource_key, {**arguments, "outs": made}, finish
        )
        return assets

    return decorate


@overload
def torch_distributor_op(
    train: Callable[..., Any] | Program, /, *, args: Sequence[Any] = (), **arguments: Any
) -> dg.OpDefinition: ...
@overload
def torch_distributor_op(
    *, num_processes: NumProcesses | None = None, **arguments: Any
) -> Callable[[Callable[..., Any]], dg.OpDefinition]: ...
def torch_distributor_op(
    train: Callable[..., Any] | Program | None = None,
    /,
    *,
    args: Sequence[Any] = (),
    num_processes: NumProcesses | None = None,
    options: Mapping[str, Any] | None = None,
    resource_key: str = DEFAULT_RESOURCE_KEY,
    **op_arguments: Any,
) -> dg.OpDefinition | Callable[[Callable[..., Any]], dg.OpDefinition]:
    """Makes an op that runs a function or a script on every rank; its output is rank 0's value.

    A function's parameters are the op's inputs, except ``config`` and ``partition_key``, which are special as in
    `torch_asset`. A script has no inputs; order it with ``ins={"start": In(Nothing)}``.

    Args:
        train: A function, ``"path/to/script.py"`` (relative to the calling file, else to the working directory),
            ``"package.module:function"``, ``"-m package.module"``, or a command as a list of words.
        args: The rest of the command line, or the arguments of ``"package.module:function"``.
        num_processes: As for `torch_asset`.
        options: As for `torch_asset`.
        resource_key: As for `torch_asset`.
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
    changes = collect_changes(options, num_processes=num_processes)
    if isinstance(outs := op_arguments.get("out"), Mapping) and len(outs) > 1:
        raise dg.DagsterInvalidDefinitionError(
            "torch_distributor_op makes one output, rank 0's value: for several, write an op that calls "
            "TorchDistributorResource.run"
        )

    def decorate(function: Callable[..., Any]) -> dg.OpDefinition:
        return cast(dg.OpDefinition, _make(dg.op, function, changes, resource_key, op_arguments, _take_single))

    if train is None or callable(train):
        if args:
            raise dg.DagsterInvalidDefinitionError("args are for a program: the parameters of a function are inputs")
        return decorate if train is None else decorate(train)
    words, program = [os.fspath(train)] if isinstance(train, (str, os.PathLike)) else list(train), train
    folder = os.path.dirname(sys._getframe(1).f_globals.get("__file__", ""))
    if isinstance(train, (str, os.PathLike)) and os.path.isfile(beside := os.path.join(folder, train)):
        program = os.path.abspath(beside)

    # The function has no return annotation, under which Dagster would not accept an Output object.
    def compute(context: dg.OpExecutionContext):  # type: ignore[no-untyped-def]
        resource: TorchDistributorResource = getattr(context.resources, resource_key)
        return resource.options(**changes).run(context, program, *args)

    name = os.path.basename(words[0]).removeprefix("-m ").removesuffix(".py").rpartition(":")[2]
    compute.__name__, compute.__doc__ = re.sub(r"\W", "_", name), f"Runs {' '.join(words)} on every rank."
    return cast(dg.OpDefinition, dg.op(**_with_resource(op_arguments, resource_key))(compute))


def _without_result(metadata: Any) -> dict[str, Any]:
    """Returns the metadata of a whole result without the entries about its file: a part has a file of its own."""
    return {entry: shown for entry, shown in (metadata or {}).items() if entry not in RESULT_ENTRIES}


def _with_check_partitions(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of Dagster's decorator with the asset's partitions in its checks."""
    if (partitions := arguments.get("partitions_def")) is None or not arguments.get("check_specs"):
        return dict(arguments)
    return {**arguments, "check_specs": [with_partitions(spec, partitions) for spec in arguments["check_specs"]]}


def _with_checks(
    context: dg.AssetExecutionContext, results: Iterable[Any], specs: Sequence[dg.AssetCheckSpec], metadata: Any
) -> Iterator[Any]:
    # A generator: Dagster would treat a tuple as all outputs, and an output may be left out. A check comes behind the
    # materialization that it is about.
    yield from results
    yield from reported_checks(context, specs, metadata or {})


def _make(
    decorator: Callable[..., Any],
    train: Callable[..., Any],
    changes: Mapping[str, Any],
    resource_key: str,
    arguments: Mapping[str, Any],
    finish: _Finish,
    fixed: Mapping[str, Any] | None = None,
    inputs: Collection[str] | None = None,
) -> Any:
    """Makes an asset or op by Dagster's decorator, of a function whose signature has the training's inputs.

    A parameter that ``ins`` describes among the arguments of Dagster's decorator is an input, whatever its name.
    """
    is_op = decorator is dg.op
    check_function("torch_distributor_op" if is_op else f"torch_{decorator.__name__}", train)
    signature = inspect.signature(train)
    named_ins = arguments.get("ins") or {}
    taken = [
        parameter
        for name, parameter in signature.parameters.items()
        if name not in (fixed or {}) and (inputs is None or name in inputs)
    ]
    partitions = PartitionArguments.of(train.__name__, taken, frozenset(named_ins))
    taken = [parameter for parameter in taken if parameter.name not in partitions.taken]
    ins = ins_of(train, taken, named_ins, is_op=is_op)

    # The context is an asset's or an op's, and the value may be an Output: Dagster compares both with annotations.
    def compute(context, **given):  # type: ignore[no-untyped-def]
        keys = partitions.fill(context)
        resource: TorchDistributorResource = getattr(context.resources, resource_key).options(**changes)
        if PARTITION_KEYS in keys:
            # The value is needed, since it is split by partition.
            resource = resource.options(by_reference=False)
        result = resource._run(context, train, (), {**(fixed or {}), **given, **keys})
        return finish(context, result, keys.get(PARTITION_KEYS, []))

    returns: Any = inspect.Signature.empty
    if signature.return_annotation in (None, "None"):
        returns = compute.__annotations__["return"] = None
    # Dagster reads positional inputs, defaults and the config class from the signature alone, also if `ins` are given.
    parameters = step_parameters(train, taken)
    compute.__signature__ = inspect.Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
    compute.__name__ = compute.__qualname__ = train.__name__
    compute.__module__, compute.__doc__ = train.__module__, train.__doc__
    return decorator(**_with_resource({**arguments, "ins": ins}, resource_key))(compute)


def _with_resource(arguments: Mapping[str, Any], resource_key: str) -> dict[str, Any]:
    """Returns the arguments of Dagster's decorator with the resource among the required ones."""
    required = {*(arguments.get("required_resource_keys") or ()), resource_key}
    return {**arguments, "required_resource_keys": required}


def collect_changes(options: Mapping[str, Any] | None, **named: Any) -> dict[str, Any]:
    """Returns the changes to the resource as one dict; raises DagsterInvalidDefinitionError for those it refuses."""
    changes = {**{name: value for name, value in named.items() if value is not None}, **(options or {})}
    try:
        TorchDistributorResource()._changed(changes)
    except ValidationError as error:
        raise dg.DagsterInvalidDefinitionError(f"wrong options: {error}") from error
    return changes


def _by_output(function: str, value: Any, names: list[str], required: set[str]) -> dict[str, Any]:
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


def _take_single(context: Any, result: Any, keys: list[str]) -> Any:
    """Returns the result of a step for its IO manager: a single partition's value is taken out of the dict by key.

    The keys are the ``partition_keys`` that the function got; empty if it does not take them.
    """
    value = _of_single(result.value, keys, name_of(context))
    if value is result.value:
        return result
    if isinstance(result, dg.MaterializeResult):
        # The version belongs to the dict, not to the value.
        return result._replace(value=value, data_version=None)
    return dg.Output(value, metadata=result.metadata)


def _of_single(value: Any, keys: list[str], name: str) -> Any:
    """Returns the value of the only partition from a dict by key; any other value unchanged, for the IO manager."""
    if len(keys) == 1 and isinstance(value, Mapping):
        return by_partition(value, keys, name)[keys[0]]
    return value
