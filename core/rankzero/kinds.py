"""The kinds of option values: each checks a value, knows its form in configuration files, and reads it from text.

`rankzero.options` gives each option its kind. Other configuration (a compatibility layer's, the doctor's) uses the same
checks, so that a wrong value has the same message everywhere.
"""

from __future__ import annotations

import contextlib
import json
import math
import operator
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rankzero.errors import InvalidJobError

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,199}")

WorldSize = int | tuple[int, int]
"""Number of ranks, or for an elastic job the smallest and the largest."""

NumProcesses = WorldSize | Literal["auto"]
"""World size of a launcher; ``"auto"`` is the number of slots of its engine."""

AUTO: Literal["auto"] = "auto"

RestartOn = str | type[BaseException] | Callable[[BaseException], Any] | Sequence[str | type[BaseException]]
"""Exceptions of the user's code after which a run is restarted: texts, classes, or a function of the exception."""


def _wrong(what: str) -> InvalidJobError:
    return InvalidJobError(what, code="RZ-1001")


def as_text(name: str, text: str) -> Any:
    """Returns the text, which is the value itself."""
    return text


@dataclass(frozen=True)
class Kind:
    """A kind of option value.

    Attributes:
        check: Returns the value as rankzero uses it, from the option's name and the given value. Raises
            InvalidJobError.
        form: The form of a text, for the help of the command line; empty if there is no text for a value.
        plain: Type of the value in configuration files and on command lines; None if they cannot hold it.
        read: Returns the value that a text stands for, from the option's name and the text. Raises InvalidJobError.
    """

    check: Callable[[str, Any], Any]
    form: str = ""
    plain: Any = None
    read: Callable[[str, str], Any] = as_text


def valued(
    is_valid: Callable[[Any], bool], wanted: str, form: str = "", plain: Any = None, read: Any = as_text
) -> Kind:
    """Returns a kind whose values are used as they are given."""

    def check(name: str, value: Any) -> Any:
        if plain is int and hasattr(type(value), "__index__") and not isinstance(value, bool):
            value = operator.index(value)  # Of numpy's integers
        if not is_valid(value):
            raise _wrong(f"{name} is {value!r}; {wanted}")
        return value

    return Kind(check, form, plain, read)


def _reader(wanted: str, *types: Callable[[str], Any]) -> Callable[[str, str], Any]:
    """Returns a function that reads a text with the first type that accepts it."""

    def read(name: str, text: str) -> Any:
        for convert in types:
            with contextlib.suppress(ValueError):
                return convert(text)
        raise _wrong(f"{name} is {text!r}; {wanted}")

    return read


_UNITS = {"w": 7 * 86400, "d": 86400, "h": 3600, "m": 60, "s": 1}


def duration(text: str) -> float:
    """Returns the seconds of a text with units, such as ``1h30m`` or ``90s``. Raises ValueError for any other text."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([wdhms])", text)
    if not parts or "".join(map("".join, parts)) != text.strip():
        raise ValueError(text)
    return sum(float(count) * _UNITS[unit] for count, unit in parts)


_read_count = _reader("it must be a whole number", int)
_read_bound = _reader("it must be a whole number or MIN:MAX", int)


def _read_world(name: str, text: str) -> Any:
    counts = tuple(_read_bound(name, count) for count in text.split(":", 1)) if text.strip() != AUTO else (AUTO,)
    return counts if len(counts) > 1 else counts[0]


def _check_world(name: str, value: Any) -> NumProcesses:
    if not isinstance(value, (tuple, list)):
        return AUTO if isinstance(value, str) and value == AUTO else POSITIVE.check(name, value)
    if not _is_range(value):
        raise _wrong(f"{name} is {value!r}; an elastic world has a smallest and a largest size, such as (2, 8)")
    return value[0], value[1]


def _is_range(value: Any) -> bool:
    """Returns True for a pair of positive integers, the smaller one first."""
    whole = isinstance(value, (tuple, list)) and all(type(number) is int for number in value)
    return whole and len(value) == 2 and 0 < value[0] <= value[1]


def _check_paths(name: str, value: Any) -> Any:
    if isinstance(value, (str, bytes, os.PathLike)) or not isinstance(value, Sequence):
        raise _wrong(f"{name} is {value!r}; give a list")
    for item in value:
        PATH.check(name, item)
    return value


def _check_strings(name: str, value: Any) -> dict[str, str]:
    """Returns the mapping, with numbers and flags as Spark spells them, as JSON, YAML and templates make them."""
    if value is not None and not hasattr(value, "keys"):
        raise _wrong(f"{name} is {value!r}; it must map strings to strings")
    given = {key: value[key] for key in value or ()}
    pairs = {key: json.dumps(item) if isinstance(item, (int, float)) else item for key, item in given.items()}
    for key, item in pairs.items():
        if not isinstance(key, str) or not isinstance(item, str):
            # Not the value, which may be a password.
            raise _wrong(f"{name}[{key!r}] is a {type(item).__name__}; names and values must be strings")
    return pairs


def _check_restart_on(name: str, value: Any) -> Any:
    if callable(value) and not isinstance(value, type):
        return value
    items = tuple(value) if isinstance(value, (list, tuple, set, frozenset)) else (value,)
    for item in items:
        is_class = isinstance(item, type) and issubclass(item, BaseException)
        if not (is_class or (isinstance(item, str) and item)):
            raise _wrong(
                f"{name} has {item!r}; give texts of errors and classes of exceptions, or one function of the "
                "exception that returns True for another attempt"
            )
    return items


_BACKENDS = ("auto", "nccl", "gloo", None)

SECONDS = valued(
    lambda value: type(value) in (int, float) and 0 < value < math.inf,
    "it must be a positive number of seconds",
    "TIME",
    float,
    _reader("it must be a number of seconds, or a time such as 90s or 1h30m", int, float, duration),
)
COUNT = valued(
    lambda value: type(value) is int and value >= 0, "it must be a whole number, 0 or more", "N", int, _read_count
)
POSITIVE = valued(
    lambda value: type(value) is int and value > 0, "it must be a positive integer", "N", int, _read_count
)
FLAG = valued(lambda value: type(value) is bool, "it must be True or False", "FLAG", bool)
BACKEND = valued(
    _BACKENDS.__contains__,
    f"choose one of {', '.join(map(repr, _BACKENDS))}",
    "auto|nccl|gloo|none",
    str,
    lambda name, text: None if text == "none" else text,
)
MODE = valued(("min", "max").__contains__, 'choose "min" or "max"')
TEXT = valued(lambda value: isinstance(value, str), "it must be a string or None", "TEXT", str)
LOCATION = valued(
    lambda value: isinstance(value, (str, os.PathLike)), "it must be a path or an fsspec URL", "STORE", str
)
WORLD = Kind(_check_world, "N|MIN:MAX|auto", None, _read_world)
PORTS = valued(
    lambda value: _is_range(value) and value[1] < 65536,
    "give the first and the last port, for example (40000, 40100)",
    "FIRST:LAST",
    list[int],
    _read_world,
)
RUN_ID = valued(
    lambda value: isinstance(value, str) and _RUN_ID.fullmatch(value) is not None,
    "it cannot name a directory: use letters, digits and . _ = + -, 200 characters at most, starting with a letter or "
    "digit",
    "ID",
    str,
)
PATH = valued(lambda value: isinstance(value, (str, os.PathLike)) and str(value) != "", "give a path", "PATH", str)
PATHS = Kind(_check_paths, "PATH", list[str])
STRINGS = Kind(_check_strings, "NAME=VALUE", dict[str, str])
RESTART_ON = Kind(_check_restart_on, "ERROR", list[str])
