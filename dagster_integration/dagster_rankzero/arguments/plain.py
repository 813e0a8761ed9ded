"""Removes Dagster's objects from what is sent to ranks, since executors may not have Dagster."""

import types
from collections.abc import Mapping
from typing import Any

import dagster as dg


def without_dagster(value: Any) -> Any:
    """Returns a value with Dagster's objects in it replaced, also inside lists, tuples and dicts.

    Args:
        value: An argument of a training function.

    Returns:
        The value; a `dagster.Config` becomes a `types.SimpleNamespace` with the same attributes
        and a `dagster.MultiPartitionKey` the string ``"a|b"``.

    Example:
        >>> class Optimizer(dg.Config):
        ...     lr: float
        >>> without_dagster(Optimizer(lr=0.1))
        namespace(lr=0.1)
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
