"""Decides which values JSON, and the databases of orchestrators, return unchanged. Standard library only."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from typing import Any

from rankzero.errors import encodable

MAX_DEPTH = 100  # Most levels of nested containers, since the readers and writers of files recurse
MAX_BITS = 2032  # Most bits of an integer, since ``torch.load(weights_only=True)`` reads no more
_EXACT_FLOATS = 1e16  # Floats from here on have an exponent, and PostgreSQL's ``jsonb`` returns them as integers
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON's reader joins two to one character, and UTF-8 has none
_REPEATS = 1000  # Containers that may be visited repeatedly, in addition to twice the number of all containers


def is_json(value: object) -> bool:
    """Returns True if JSON returns the value exactly: same types, string keys, no tuples."""
    return consists_of(value, (list, dict), is_atom, _is_text)


def consists_of(
    value: object, containers: tuple[type, ...], is_part: Callable[[Any], bool], is_key: Callable[[Any], bool]
) -> bool:
    """Returns True if a value has only containers of these types, with such keys of dicts and such other parts.

    False for containers that contain themselves, or the same containers many times.
    """
    level: list[Any] = [value]
    seen, visited = set[int](), 0
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if type(item) in containers:
                visited += 1
                seen.add(id(item))
                if isinstance(item, dict) and not all(map(is_key, item)):
                    return False
                below += item.values() if isinstance(item, dict) else item
            elif not is_part(item):
                return False
        if not below or visited > 2 * len(seen) + _REPEATS:
            return not below
        level = below
    return False


def _is_text(item: object) -> bool:
    return type(item) is str and not _SURROGATE.search(item)


def is_atom(item: object) -> bool:
    """Returns True for a value without parts that JSON returns exactly."""
    if type(item) is int:
        return item.bit_length() <= MAX_BITS
    return item is None or type(item) in (bool, float) or _is_text(item)


def canonical(obj: Any) -> Any:
    """Returns the object that is pickled for a string or tuple, since a pickle depends on which equal parts are one.

    Equal strings become one object. A tuple of plain values becomes another one each time, since it may be one constant
    in several places. Other objects are returned unchanged.
    """
    if type(obj) is str:
        return sys.intern(obj)
    return (*obj,) if type(obj) is tuple and all(map(is_atom, obj)) else obj


def _is_storable(atom: object) -> bool:
    """Returns True for an atom that JSON documents, ``jsonb`` columns and msgpack all return unchanged."""
    if type(atom) is int:
        return -(2**63) <= atom < 2**63
    if type(atom) is float:
        # False for nan and inf, too. jsonb has no negative zero.
        return abs(atom) < _EXACT_FLOATS and (atom != 0.0 or math.copysign(1.0, atom) > 0)
    return atom is None or type(atom) is bool or (_is_text(atom) and "\0" not in str(atom))


def find_unstorable(value: Any) -> str | None:
    """Returns a description of why a database would reject or change a JSON value, or None."""
    stored = storable(value)
    return None if repr(stored) == repr(value) else f"a database would return {stored!r:.200} for it"


def storable(value: Any) -> Any:
    """Returns facts about a run in which each part that a database could reject or change is replaced by its text.

    Keys of dicts lose leading ``__``, since Airflow reserves such keys.
    """
    if isinstance(value, dict):
        named = {str(key).lstrip("_") if str(key).startswith("__") else key: item for key, item in value.items()}
        return {storable(key): storable(item) for key, item in named.items()}
    if isinstance(value, (list, tuple)):
        return [storable(item) for item in value]
    return value if _is_storable(value) else encodable(str(value))


def plain_view(value: object, most: int) -> Any:
    """Returns the value as exact JSON, with numpy scalars and 0-d arrays and tensors as Python numbers.

    Raises ValueError if it is not exact JSON then, or has more than ``most`` characters as JSON.
    """
    if not consists_of(value, (list, dict), lambda item: is_atom(item) or is_atom(_number(item)), _is_text):
        raise ValueError(f"it is a {type(value).__name__}, or holds parts, that are no JSON values")
    text = json.dumps(value, default=_number)
    if len(text) > most:
        raise ValueError(f"it has {len(text)} characters as JSON, and {most} are the limit")
    return json.loads(text)


def _number(item: Any) -> Any:
    """Returns a boolean, integer or float of numpy or torch as Python's; other objects unchanged."""
    is_number = getattr(item, "ndim", 1) == 0 and getattr(item.dtype, "kind", "f") in "biuf"
    return item.item() if is_number else item
