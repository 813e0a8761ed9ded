"""The arguments of a training by name: `bind` maps a call to names, `params_of` describes the values as short ones."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rankzero.masking import MASK, Mask, hides, secrets_of, without_credentials
from rankzero.submit.training import Program
from rankzero.values.ref import ResultRef

MAX_PARAMS = 200
"""Most arguments of a training that are shown."""

MAX_TEXT = 500
"""Characters to which a value is cut."""

_DEPTH = 4

_BITS = 1024
"""Most bits of an integer that is written out: more digits than Python writes would fail the submission."""

_NAMESPACES = frozenset({"types.SimpleNamespace", "argparse.Namespace", "pydantic.main.BaseModel"})
"""Classes whose instances, also those of subclasses, keep their settings in ``__dict__``."""

_ASSIGNED = re.compile(r"(?:--(?P<long>[^=]+)|[-+~]*(?P<name>\w[\w.@-]*))=(?P<value>.*)", re.DOTALL)
"""A word of a command line: ``--name=value``, or ``name=value`` as Hydra has it; not the path ``data/day=1``."""


def params_of(
    training: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], env: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the arguments of a call as short plain values, with the defaults of those that were not given.

    Args:
        training: The result of `rankzero.submit.training.resolve`.
        args: Positional arguments, or the rest of the command line.
        kwargs: Keyword arguments.
        env: The ranks' variables. Their secrets are masked, and those of the arguments and of URLs in them.

    Returns:
        Values by name; for a dict, namespace, dataclass or pydantic model among the arguments, each of its values by
        ``argument.key``.

    Example:
        >>> def train(lr, *, model, token=""): ...
        >>> params_of(train, (0.1,), {"model": {"layers": 2, "weights": object()}, "token": "geheim"}, {})
        {'lr': 0.1, 'model.layers': 2, 'model.weights': 'object', 'token': '***'}
    """
    if isinstance(training, Program):
        named = dict(_of_line([str(word) for word in (*training.line, *args)]))
    else:
        named = bind(training, args, kwargs, all_of=True)
    flat = dict(_flat(named, "", _DEPTH))
    # A secret of one argument may be part of another.
    mask = Mask(secrets_of(env) + secrets_of(flat))
    return {name: _plain(name, value, mask) for name, value in itertools.islice(flat.items(), MAX_PARAMS)}


def bind(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, all_of: bool = False) -> dict[str, Any]:
    """Returns the arguments of a call by name; one without a name, as of a command line, has its position.

    Args:
        function: The function or `Program`.
        args: Positional arguments.
        kwargs: Keyword arguments.
        all_of: True for the defaults of those that were not given, too.

    Example:
        >>> def train(lr, *layers, epochs): ...
        >>> bind(train, (0.1, 8, 8), {"epochs": 3})
        {'lr': 0.1, 'layers.0': 8, 'layers.1': 8, 'epochs': 3}
    """
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        # Some functions written in C have no signature.
        return {**{f"#{number}": value for number, value in enumerate(args, 1)}, **kwargs}
    if all_of:
        bound.apply_defaults()
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            # The name of a positional-only parameter may also be that of an option.
            named |= {f"{name}.{key}" if key in named else key: each for key, each in value.items()}
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            named |= {f"{name}.{number}": each for number, each in enumerate(value)}
        else:
            named[name] = value
    return named


def _of_line(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Yields ``--name value``, ``--name=value``, ``name=value`` and ``--flag`` by name, other words by position."""
    number, rest = 0, [*words]
    while rest:
        word = rest.pop(0)
        if assigned := _ASSIGNED.fullmatch(word):
            yield assigned["long"] or assigned["name"], assigned["value"]
        elif not word.startswith("--") or word == "--":
            yield f"args.{number}", word
            number += 1
        else:
            yield word[2:], rest.pop(0) if rest and not rest[0].startswith("--") else True


def _flat(values: Mapping[Any, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if depth and (entries := _entries_of(value)):
            yield from _flat(entries, f"{name}.", depth - 1)
        else:
            yield name, value


def _entries_of(value: Any) -> Mapping[Any, Any]:
    """Returns the settings in a value by name; empty for a value of another kind."""
    if type(value) is dict:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, ResultRef)):
        # A field that its class leaves out of its representation may be a secret.
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value) if each.repr}
    is_namespace = any(f"{cls.__module__}.{cls.__qualname__}" in _NAMESPACES for cls in type(value).__mro__)
    return dict(vars(value)) if is_namespace else {}


def _plain(name: str, value: Any, mask: Mask) -> Any:
    if isinstance(value, int) and value.bit_length() > _BITS:
        return f"an integer of {value.bit_length()} bits"
    if hides(name, value):
        return MASK
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, ResultRef):
        return value.uri
    if isinstance(value, (list, tuple)) and all(isinstance(item, (str, bool, int, float)) for item in value[:MAX_TEXT]):
        value = str([_plain("", item, mask) for item in value[:MAX_TEXT]])
    return without_credentials(mask.text(value))[:MAX_TEXT] if isinstance(value, str) else type(value).__name__
