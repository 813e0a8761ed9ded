"""Inputs of a training function: values without objects of Dagster, or the `ResultRef` that the ranks open."""

import contextlib
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any

import dagster as dg

import rankzero
from dagster_rankzero._compat import dagster_type_of


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

    Args:
        value: An argument of a training function.

    Returns:
        The value; a `dagster.Config` becomes a `types.SimpleNamespace` with the same fields and properties,
        without its methods, and a `dagster.MultiPartitionKey` the string ``"a|b"``.

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
