"""Arguments of a training function: values without Dagster's objects, `ResultRef` that ranks open, partition keys."""

import contextlib
import functools
import hashlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg

import rankzero
from dagster_rankzero._compat import dagster_type_of, name_of

PARTITION_KEY = "partition_key"
PARTITION_KEYS = "partition_keys"


class OpenedByRanks(dg.DagsterType):
    """Type of an input that is passed to ranks: a value of the annotated type, or its handle.

    IO managers that choose by ``typing_type`` see the annotation of the training function.
    """

    def __init__(self, inner: dg.DagsterType) -> None:
        def check(context: dg.TypeCheckContext, value: object) -> dg.TypeCheck:
            return dg.TypeCheck(success=True) if is_reference(value) else inner.type_check(context, value)

        self._shown = inner.display_name
        # The type has a key instead of a name: two inputs with one annotation have two types, and names must be unique.
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


def type_of_input(annotation: Any) -> dg.DagsterType:
    """Returns the type for an annotation of the training function."""
    return OpenedByRanks(dagster_type_of(annotation))


def is_reference(value: object) -> bool:
    """Returns True for a handle, and for the dict of handles of several partitions."""
    if isinstance(value, dict) and value:
        return all(isinstance(item, rankzero.ResultRef) for item in value.values())
    return isinstance(value, rankzero.ResultRef)


def wants_reference(dagster_type: dg.DagsterType) -> bool:
    """Returns True if an IO manager may give this input a handle instead of the value.

    Inputs of a training function accept a handle, and inputs that are annotated ``ResultRef``, ``ResultRef | None`` or
    ``dict[str, ResultRef]``.
    """
    annotation = dagster_type.typing_type
    wanted = (annotation, *typing.get_args(annotation))
    return isinstance(dagster_type, OpenedByRanks) or rankzero.ResultRef in wanted


def without_dagster(value: Any) -> Any:
    """Returns a value with Dagster's objects in it replaced, also inside lists, tuples and dicts.

    A `dagster.Config` becomes a `types.SimpleNamespace` with the same fields and properties, without its methods, and a
    `dagster.MultiPartitionKey` the string ``"a|b"``.

    Example:
        >>> class Optimizer(dg.Config):
        ...     lr: float
        >>> without_dagster(Optimizer(lr=0.1))
        namespace(lr=0.1)
    """
    if isinstance(value, dg.Config):
        found = {name: without_dagster(item) for name, item in value} | _properties(value)
        return types.SimpleNamespace(**found)
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


def _properties(config: dg.Config) -> dict[str, Any]:
    """Returns the values of the properties that a config's own classes define, except of those that raise an error."""
    found = {}
    for cls in type(config).__mro__[: type(config).__mro__.index(dg.Config)]:
        for name, member in vars(cls).items():
            if isinstance(member, (property, functools.cached_property)) and not name.startswith("_"):
                with contextlib.suppress(Exception):
                    found[name] = without_dagster(getattr(config, name))
    return found


def without_annotations(train: Any) -> Any:
    """Returns a copy of a plain function without annotations; any other value unchanged.

    An annotation such as ``config: TrainConfig`` would pickle the class, its base class and so Dagster with the
    function.
    """
    if not isinstance(train, types.FunctionType) or not train.__annotations__:
        return train
    copy = types.FunctionType(train.__code__, train.__globals__, train.__name__, train.__defaults__, train.__closure__)
    copy.__kwdefaults__ = train.__kwdefaults__
    copy.__qualname__ = train.__qualname__
    copy.__module__ = train.__module__
    copy.__doc__ = train.__doc__
    return copy


@dataclass(frozen=True)
class PartitionArguments:
    """The parameters ``partition_key`` and ``partition_keys`` of a function: those it takes, those without default."""

    name: str
    taken: frozenset[str]
    needed: frozenset[str]

    @staticmethod
    def of(train: Callable[..., Any], named_ins: frozenset[str]) -> "PartitionArguments":
        """Reads the signature of a function; parameters in ``named_ins`` are inputs, whatever their names."""
        found = {
            name: parameter
            for name, parameter in inspect.signature(train).parameters.items()
            if name in (PARTITION_KEY, PARTITION_KEYS) and name not in named_ins
        }
        needed = frozenset(name for name, parameter in found.items() if parameter.default is inspect.Parameter.empty)
        return PartitionArguments(train.__name__, frozenset(found), needed)

    def check(self, partitions_def: object, backfill_policy: dg.BackfillPolicy | None) -> None:
        """Raises DagsterInvalidDefinitionError if no run, or no backfill, could provide the needed parameters."""
        if self.needed and partitions_def is None:
            raise dg.DagsterInvalidDefinitionError(
                f"{self.name} has a parameter {min(self.needed)!r}, but the asset has no partitions: "
                "give partitions_def"
            )
        several = backfill_policy is not None and backfill_policy.max_partitions_per_run != 1
        if several and PARTITION_KEY in self.needed:
            raise dg.DagsterInvalidDefinitionError(
                f"{self.name} takes one {PARTITION_KEY!r}, but its backfills give several to one run: take "
                f"{PARTITION_KEYS!r} and return a dict with one value for each, or use BackfillPolicy.multi_run()"
            )

    def fill(self, context: Any) -> dict[str, Any]:
        """Returns the partition arguments for a run.

        Raises:
            dagster.Failure: the run has no partition, or several although the function takes one. Not retried.
        """
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

    Raises:
        dagster.Failure: the value is a dict with other keys than the only partition's. Not retried.
    """
    value = of_single(result.value, keys, name_of(context))
    if value is result.value:
        return result
    if isinstance(result, dg.MaterializeResult):
        # The version belongs to the dict, not to the value.
        return result._replace(value=value, data_version=None)
    return dg.Output(value, metadata=result.metadata)


def of_single(value: Any, keys: list[str], name: str) -> Any:
    """Returns the value of the only partition from a dict by key; any other value unchanged, for the IO manager.

    Raises:
        dagster.Failure: the dict has other keys than the only partition's. Not retried.
    """
    if len(keys) == 1 and isinstance(value, Mapping):
        return by_partition(value, keys, name)[keys[0]]
    return value


def by_partition(value: Any, keys: list[str], name: str) -> dict[str, Any]:
    """Returns the value of every partition from the output, with that name, of a run with those keys.

    Raises:
        dagster.Failure: the output is not a dict with the run's partition keys. Not retried.
    """
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

    Most keys are their own names. A slash, a percent sign and a NUL are escaped, so that no two keys share a name.

    Example:
        >>> segment("2026-01-01"), segment("a/b"), segment("a%2Fb"), segment(".."), segment("")
        ('2026-01-01', 'a%2Fb', 'a%252Fb', '%2E%2E', '%')
    """
    name = re.sub(r"[%/\0]", lambda found: f"%{ord(found[0]):02X}", text)
    if name in (".", ".."):
        return name.replace(".", "%2E")
    encoded = name.encode("utf-8", "surrogatepass")
    if len(encoded) > LIMIT:
        return f"{encoded[:_KEPT].decode('utf-8', 'ignore')}%~{hashlib.sha256(encoded).hexdigest()[:32]}"
    return name or "%"
