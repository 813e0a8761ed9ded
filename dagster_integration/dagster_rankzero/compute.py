"""Builds the function that Dagster calls for a step from a training function."""

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_origin

import dagster as dg
from pydantic import ValidationError

from dagster_rankzero.fields import ADDED, added_to, check_fields
from dagster_rankzero.inputs import PARTITION_KEYS, PartitionArguments, take_single, type_of_input
from dagster_rankzero.resource import TorchDistributorResource
from rankzero.pipeline import reports

CONTEXT_NAMES = frozenset({"context", "_context", "context_", "_"})
"""Names of a first parameter for which Dagster passes its context."""

CONFIG = "config"
BOUND = "_rankzero_bound"
"""Attribute of a training function that stands for another one with fixed arguments: that function, and those."""

_EMPTY = inspect.Parameter.empty


def build_compute(
    decorator: str,
    train: Callable[..., Any],
    resource_key: str,
    options: Mapping[str, Any],
    context_type: type[Any],
    arguments: Mapping[str, Any],
    finish: Callable[[Any, Any, list[str]], Any] = take_single,
) -> Callable[..., Any]:
    """Builds the step's function: its signature, which ``@dg.asset`` and ``@dg.op`` read, has the training's inputs.

    A parameter that ``ins`` describes among the arguments of Dagster's decorator is an input, whatever its name.
    ``finish`` makes the step's return value from its context, the result of the run, and its ``partition_keys``.

    Raises:
        dagster.DagsterInvalidDefinitionError: a parameter cannot reach the ranks.
    """
    check_function(decorator, train)
    partitions = PartitionArguments.of(train, frozenset(arguments.get("ins") or ()))
    if context_type is dg.AssetExecutionContext:
        partitions.check(arguments.get("partitions_def"), arguments.get("backfill_policy"))
    returns_nothing = inspect.signature(train).return_annotation in (None, "None")
    bound: tuple[Callable[..., Any], dict[str, Any]] = getattr(train, BOUND, (train, {}))

    def compute(context: Any, **inputs: Any) -> Any:
        function, fixed = bound
        given = partitions.fill(context)
        resource: TorchDistributorResource = getattr(context.resources, resource_key).options(**options)
        if PARTITION_KEYS in given:
            # The value is needed, since it is split by partition.
            resource = resource.options(by_reference=False)
        result = resource._run(context, function, (), {**fixed, **inputs, **given})
        return finish(context, result, given.get(PARTITION_KEYS, []))

    parameters = [inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=context_type)]
    parameters += [
        _as_step_parameter(train, parameter)
        for parameter in inspect.signature(train).parameters.values()
        if parameter.name not in partitions.taken
    ]
    parameters.sort(key=lambda parameter: parameter.default is not _EMPTY)
    parameters.sort(key=lambda parameter: parameter.kind)
    returns = None if returns_nothing else inspect.Signature.empty
    compute.__signature__ = inspect.Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
    compute.__annotations__ = {p.name: p.annotation for p in parameters if p.annotation is not _EMPTY}
    if returns_nothing:
        compute.__annotations__["return"] = None
    compute.__name__ = compute.__qualname__ = train.__name__
    compute.__module__ = train.__module__
    compute.__doc__ = train.__doc__
    return compute


def with_resource(arguments: Mapping[str, Any], resource_key: str) -> dict[str, Any]:
    """Returns the arguments of Dagster's decorator with the resource among the required ones."""
    required = {*(arguments.get("required_resource_keys") or ()), resource_key}
    return {**arguments, "required_resource_keys": required}


def check_function(decorator: str, train: object) -> None:
    """Raises DagsterInvalidDefinitionError unless a training function is one that ranks can call."""
    if not inspect.isfunction(train) or inspect.iscoroutinefunction(train) or inspect.isgeneratorfunction(train):
        raise dg.DagsterInvalidDefinitionError(
            f"{decorator} is given {train!r}; it takes a plain function, which runs on every rank"
        )


def collect_options(options: Mapping[str, Any] | None, **named: Any) -> dict[str, Any]:
    """Returns the changes to the resource as one dict.

    Raises:
        dagster.DagsterInvalidDefinitionError: a name is not a field of the resource, or its value is wrong.
    """
    changes = {**{name: value for name, value in named.items() if value is not None}, **(options or {})}
    check_fields(TorchDistributorResource, changes)
    try:
        # None as a value of a mapping removes an entry of the project's resource, which does not exist yet.
        added = {name: added_to({}, changes[name]) for name in ADDED.intersection(changes)}
        TorchDistributorResource(**{**changes, **added})
    except ValidationError as error:
        raise dg.DagsterInvalidDefinitionError(f"wrong options: {error}") from error
    return changes


def _as_step_parameter(train: Callable[..., Any], parameter: inspect.Parameter) -> inspect.Parameter:
    name, annotation, why = parameter.name, _annotation_of(train, parameter), ""
    if name in CONTEXT_NAMES:
        why = f"has a parameter {name!r}, but it runs inside ranks, where Dagster's context does not exist: remove it "
        why += "(rankzero.train.get_context() tells rank and world size), or call TorchDistributorResource.run from an "
        why += "asset of your own"
    elif parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
        why = f"has the parameter {str(parameter)!r}; inputs have names: make it an ordinary parameter"
    elif _is_resource(annotation):
        why = f"asks for the resource {name!r}, but it runs inside ranks, where resources do not exist: pass plain "
        why += "values, or call TorchDistributorResource.run from an asset of your own"
    if why:
        raise dg.DagsterInvalidDefinitionError(f"{train.__name__} {why}")
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return parameter.replace(annotation=_EMPTY)
    if name != CONFIG:
        annotation = type_of_input(Any if annotation is _EMPTY else annotation)
    # Dagster does not see keyword-only parameters as inputs.
    return parameter.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)


def _annotation_of(train: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Returns the annotation as an object; `Any` for a name that exists only for type checkers."""
    annotation = parameter.annotation
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, getattr(inspect.unwrap(train), "__globals__", {}))
    except NameError:
        if parameter.name == CONFIG:
            raise dg.DagsterInvalidDefinitionError(
                f"{train.__name__}: the annotation {annotation!r} of {CONFIG} is not a name of its module; "
                "define the Config class at module level"
            ) from None
        return Any


def _is_resource(annotation: Any) -> bool:
    if any(metadata == "resource_param" for metadata in getattr(annotation, "__metadata__", ())):
        return True
    cls = get_origin(annotation) or annotation
    return isinstance(cls, type) and issubclass(cls, dg.ConfigurableResource)


def build_script_compute(
    script: str | os.PathLike[str] | Sequence[str],
    args: tuple[Any, ...],
    resource_key: str,
    options: Mapping[str, Any],
    folder: str,
    finish: Callable[[Any, Any, list[str]], Any],
) -> Callable[..., Any]:
    """Builds the function of an op that runs a script, a command, or ``"package.module:function"``.

    A relative path of a script that exists in ``folder`` begins there, as a script of an Airflow task does at its file.
    """
    program = script
    if isinstance(script, (str, os.PathLike)) and os.path.isfile(
        beside := os.path.abspath(os.path.join(folder, script))
    ):
        program = beside

    # The function has no return annotation, under which Dagster would not accept an Output object.
    def compute(context: dg.OpExecutionContext):  # type: ignore[no-untyped-def]
        resource: TorchDistributorResource = getattr(context.resources, resource_key)
        return finish(context, resource.options(**options).run(context, program, *args), [])

    words = [os.fspath(script)] if isinstance(script, (str, os.PathLike)) else list(script)
    name = os.path.basename(words[0]).removeprefix("-m ").removesuffix(".py").rpartition(":")[2]
    compute.__name__ = re.sub(r"\W", "_", name)
    compute.__doc__ = f"Runs {' '.join(words)} on every rank."
    return compute


def with_reported_checks(context: dg.AssetExecutionContext, result: dg.MaterializeResult[Any], keys: list[str]) -> Any:
    """Returns the result with those of the selected checks of its asset: a ``finish`` for `build_compute`."""
    results = list(result.check_results or ())
    results += [
        check_result(key, result.metadata or {})
        for key in sorted(context.selected_asset_check_keys)
        if result.asset_key in (None, key.asset_key) and key.name not in {check.check_name for check in results}
    ]
    return take_single(context, result, keys)._replace(check_results=results)


def check_result(key: dg.AssetCheckKey, metadata: Any) -> dg.AssetCheckResult:
    """Returns the result of a check: passed if rank 0's latest value was True; failed if it has reported none."""
    from dagster_rankzero.metadata import METRIC_PREFIX

    name = reports.CHECK_PREFIX + key.name
    entry = metadata.get(METRIC_PREFIX + name)
    if entry is None:
        description = f'rank 0 did not report it: call rankzero.train.report({{"{name}": True}}) or False'
        return dg.AssetCheckResult(passed=False, asset_key=key.asset_key, check_name=key.name, description=description)
    return dg.AssetCheckResult(passed=entry.value is True, asset_key=key.asset_key, check_name=key.name)
