"""Maps the arguments of a call to the names of the function's parameters."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any


def named_arguments(train: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Returns the arguments of a call with their names, in order.

    Args:
        train: The function; a script or module has a command line without names.
        args: Positional arguments. One without a name has its position, such as ``#2``.
        kwargs: Keyword arguments.

    Example:
        >>> def train(lr, *layers, epochs): ...
        >>> named_arguments(train, (0.1, 8, 8), {"epochs": 3})
        [('lr', 0.1), ('#2', 8), ('#3', 8), ('epochs', 3)]
    """
    names = [f"#{position}" for position in range(1, len(args) + 1)]
    with contextlib.suppress(TypeError, ValueError):
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(train).parameters.values()
        known = [parameter.name for parameter in parameters if parameter.kind in kinds]
        names[: len(known)] = known[: len(names)]
    return [*zip(names, args, strict=True), *kwargs.items()]
