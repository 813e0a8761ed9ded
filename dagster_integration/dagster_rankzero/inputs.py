"""Arguments of a training function: its inputs, values without Dagster's objects, DataFrames, partition keys."""

import hashlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, get_origin

import dagster as dg

import rankzero
from dagster_rankzero._compat import dagster_type_of

CONFIG, PARTITION_KEY, PARTITION_KEYS = "config", "partition_key", "partition_keys"
"""Names of the parameters of a training function that are special."""


class OpenedByRanks(dg.DagsterType):
    """Type of an input that is passed to ranks: a value of the annotated type, or its handle."""

    def __init__(self, inner: dg.DagsterType) -> None:
        def check(context: dg.TypeCheckContext, value: object) -> dg.TypeCheck:
            return dg.TypeCheck(success=True) if is_reference(value) else inner.type_check(context, value)

        self._shown = inner.display_name
        # A key instead of a name: two inputs with one annotation have two types, and names must be unique.
        super().__init__(
            type_check_fn=check,
            key=f"{type(self).__name__}.{inner.key}",
            description=inner.description,
            typing_type=inner.typing_type,
            loader=inner.loader,
        )

    @property
    def display_name(self) -> str:
        """Returns the annotation as the UI shows it."""
        return self._shown


def is_reference(value: object) -> bool:
    """Returns True for a handle, and for the dict of handles of several partitions."""
    if isinstance(value, dict) and value:
        return all(isinstance(item, rankzero.ResultRef) for item in value.values())
    return isinstance(value, rankzero.ResultRef)


def is_frame(value: object) -> bool:
    """Returns True for a DataFrame of Spark or Spark Connect."""
    return type(value).__module__.startswith("pyspark.sql.") and hasattr(value, "mapInArrow")


def with_frames(dataset: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Returns the datasets of a training with the DataFrames among its arguments, which become names, and the rest.

    Ranks read the rows of a DataFrame as a dataset, and get its name as the argument. None: there is no DataFrame.
    """
    frames = {name: value for name, value in kwargs.items() if is_frame(value)}
    if not frames:
        return None, kwargs
    named = dataset if isinstance(dataset, Mapping) else {} if dataset is None else {"train": dataset}
    return {**named, **frames}, {**kwargs, **{name: name for name in frames}}


def wants_reference(dagster_type: dg.DagsterType) -> bool:
    """Returns True for an input of a training function, or one annotated ``ResultRef``, also in a dict or optional."""
    annotation = dagster_type.typing_type
    wanted = (annotation, *typing.get_args(annotation))
    return isinstance(dagster_type, OpenedByRanks) or rankzero.ResultRef in wanted


def without_dagster(value: Any) -> Any:
    """Returns a value with Dagster's objects in it replaced, also inside lists, tuples and dicts.

    A `dagster.Config` becomes a `types.SimpleNamespace` with the same fields, without its properties and methods, and a
    `dagster.MultiPartitionKey` the string ``"a|b"``.
    """
    if isinstance(value, dg.Config):
        return types.SimpleNamespace(**{name: without_dagster(item) for name, item in value})
    if isinstance(value, dg.MultiPartitionKey):
        return str(value)
    if type(value) is list:
        return [without_dagster(item) for item in value]
    if type(value) is tuple:
        return tuple(without_dagster(item) for item in value)
    # Dagster passes nested configuration as its own read-only mappings.
    if type(value) is dict or (isinstance(value, Mapping) and type(value).__module__.startswith("dagster")):
        return {without_dagster(key): without_dagster(item) for key, item in value.items()}
    return value


def without_annotations(train: Any) -> Any:
    """Returns a copy of a plain function without annotations, which would pickle Dagster with it; or another value."""
    if not isinstance(train, types.FunctionType) or not train.__annotations__:
        return train
    copy = types.FunctionType(train.__code__, train.__globals__, train.__name__, train.__defaults__, train.__closure__)
    for name in ("__kwdefaults__", "__qualname__", "__module__", "__doc__"):
        setattr(copy, name, getattr(train, name))
    return copy


def check_function(decorator: str, train: object) -> None:
    """Raises DagsterInvalidDefinitionError unless a training function is one that ranks can call."""
    if not inspect.isfunction(train) or inspect.iscoroutinefunction(train) or inspect.isgeneratorfunction(train):
        raise dg.DagsterInvalidDefinitionError(
            f"{decorator} is given {train!r}; it takes a plain function, which runs on every rank"
        )


def ins_of(
    train: Callable[..., Any], parameters: list[inspect.Parameter], given: Mapping[str, Any], *, is_op: bool
) -> dict[str, Any]:
    """Returns Dagster's ``ins`` for a training function: those that the user has given, and one for each parameter.

    Raises DagsterInvalidDefinitionError for a parameter that no input can fill.
    """
    ins = dict(given)
    for parameter in parameters:
        _check_parameter(train, parameter)
        name, annotation = parameter.name, annotation_of(train, parameter)
        if name != CONFIG and parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            shown = OpenedByRanks(dagster_type_of(Any if annotation is parameter.empty else annotation))
            ins[name] = _typed(given.get(name, dg.In() if is_op else dg.AssetIn()), shown)
    return ins


def step_parameters(train: Callable[..., Any], taken: list[inspect.Parameter]) -> list[inspect.Parameter]:
    """Returns the parameters of a step: the context, and those of its function; only a config has its annotation."""
    found = [inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for each in taken:
        # Dagster does not see keyword-only parameters as inputs.
        kind = each.kind if each.kind is each.VAR_KEYWORD else each.POSITIONAL_OR_KEYWORD
        found.append(
            each.replace(kind=kind, annotation=annotation_of(train, each) if each.name == CONFIG else each.empty)
        )
    return sorted(found, key=lambda each: (each.kind, each.default is not each.empty))


def _typed(given: Any, dagster_type: dg.DagsterType) -> Any:
    """Returns an `In` or `AssetIn` with the type, unless it has one."""
    known = {name: getattr(given, name) for name in inspect.signature(type(given)).parameters}
    is_typed = given.dagster_type is not type(given)().dagster_type
    return given if is_typed else type(given)(**{**known, "dagster_type": dagster_type})


def _check_parameter(train: Callable[..., Any], parameter: inspect.Parameter) -> None:
    """Raises DagsterInvalidDefinitionError for a parameter of a training function that no input can fill."""
    name, why = parameter.name, ""
    if name in ("context", "_context", "context_", "_"):
        why = f"has a parameter {name!r}, but it runs inside ranks, where Dagster's context does not exist: remove it "
        why += "(rankzero.train.get_context() tells rank and world size), or call TorchDistributorResource.run from an "
        why += "asset of your own"
    elif parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
        why = f"has the parameter {str(parameter)!r}; inputs have names: make it an ordinary parameter"
    elif _is_resource(annotation_of(train, parameter)):
        why = f"asks for the resource {name!r}, but it runs inside ranks, where resources do not exist: pass plain "
        why += "values, or call TorchDistributorResource.run from an asset of your own"
    if why:
        raise dg.DagsterInvalidDefinitionError(f"{train.__name__} {why}")


def annotation_of(train: Callable[..., Any], parameter: inspect.Parameter) -> Any:
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


@dataclass(frozen=True)
class PartitionArguments:
    """The parameters ``partition_key`` and ``partition_keys`` of a function: those it takes, those without default."""

    name: str
    taken: frozenset[str]
    needed: frozenset[str]

    @staticmethod
    def of(name: str, parameters: list[inspect.Parameter], named_ins: Collection[str]) -> "PartitionArguments":
        """Reads the parameters of a function; those in ``named_ins`` are inputs, whatever their names."""
        found = [p for p in parameters if p.name in (PARTITION_KEY, PARTITION_KEYS) and p.name not in named_ins]
        needed = frozenset(p.name for p in found if p.default is inspect.Parameter.empty)
        return PartitionArguments(name, frozenset(p.name for p in found), needed)

    def fill(self, context: Any) -> dict[str, Any]:
        """Returns the partition arguments for a run; raises dagster.Failure if it has none or too many."""
        keys = keys_of(context)
        found: dict[str, Any] = {PARTITION_KEYS: keys} if keys else {}
        if len(keys) == 1:
            found[PARTITION_KEY] = keys[0]
        if missing := self.needed - found.keys():
            has = f"the partitions {', '.join(keys)}: launch them one by one" if keys else "no partition: launch one"
            raise dg.Failure(
                f"{self.name} has a parameter {min(missing)!r}, but this run has {has}", allow_retries=False
            )
        return {name: value for name, value in found.items() if name in self.taken}


def keys_of(context: Any) -> list[str]:
    """Returns the partition keys of a context's run; empty if it has none."""
    if context.has_partition_key:
        return [str(context.partition_key)]
    return [str(key) for key in context.partition_keys] if context.has_partition_key_range else []


def dimensions_of(key: str, partitions: dg.PartitionsDefinition[Any]) -> list[str]:
    """Returns the key of each dimension of a partition, in the order of the dimensions' names; most have only one."""
    if isinstance(partitions, dg.MultiPartitionsDefinition) and not isinstance(key, dg.MultiPartitionKey):
        # A partition mapping may name it by a plain text.
        key = partitions.get_partition_key_from_str(key)
    if isinstance(key, dg.MultiPartitionKey):
        return [part for _, part in sorted(key.keys_by_dimension.items())]
    return [key]


LIMIT, _KEPT = 255, 180
# Most bytes of the name of a directory in common file systems, and of a longer name that are kept before its checksum.


def segment(text: str) -> str:
    """Returns the name of one directory for a part of an asset's key or a dimension of a partition's key.

    Example:
        >>> segment("2026-01-01"), segment("a/b"), segment("a%2Fb"), segment(".."), segment(""), segment("@a")
        ('2026-01-01', 'a%2Fb', 'a%252Fb', '%2E%2E', '%', '%40a')
    """
    name = re.sub(r"[%/\0]|^@", lambda found: f"%{ord(found[0]):02X}", text)
    if name in (".", ".."):
        return name.replace(".", "%2E")
    encoded = name.encode("utf-8", "surrogatepass")
    if len(encoded) > LIMIT:
        return f"{encoded[:_KEPT].decode('utf-8', 'ignore')}%~{hashlib.sha256(encoded).hexdigest()[:32]}"
    return name or "%"
