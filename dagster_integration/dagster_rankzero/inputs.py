"""Arguments of a training function: values without Dagster's objects, `ResultRef`, keys; DataFrames go by `step`."""

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
from dagster_rankzero._compat import dagster_type_of, name_of

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


def as_step_parameter(train: Callable[..., Any], parameter: inspect.Parameter) -> inspect.Parameter:
    """Returns the parameter of a step's function for one of its training function; raises for one that has none."""
    name, annotation, why = parameter.name, _annotation_of(train, parameter), ""
    if name in ("context", "_context", "context_", "_"):
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
        return parameter.replace(annotation=inspect.Parameter.empty)
    if name != CONFIG:
        annotation = OpenedByRanks(dagster_type_of(Any if annotation is inspect.Parameter.empty else annotation))
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


def take_single(context: Any, result: Any, keys: list[str]) -> Any:
    """Returns the result of a step for its IO manager: a single partition's value is taken out of the dict by key.

    The keys are the ``partition_keys`` that the function got; empty if it does not take them.
    """
    value = of_single(result.value, keys, name_of(context))
    if value is result.value:
        return result
    if isinstance(result, dg.MaterializeResult):
        # The version belongs to the dict, not to the value.
        return result._replace(value=value, data_version=None)
    return dg.Output(value, metadata=result.metadata)


def of_single(value: Any, keys: list[str], name: str) -> Any:
    """Returns the value of the only partition from a dict by key; any other value unchanged, for the IO manager."""
    if len(keys) == 1 and isinstance(value, Mapping):
        return by_partition(value, keys, name)[keys[0]]
    return value


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
