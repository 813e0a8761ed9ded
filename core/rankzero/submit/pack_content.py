"""Checksums of values and of code that is sent by value, by content and equal in every process.

A pickle differs between processes: sets have another order, classes of a script have random names. Here a value is a
label and its parts, whose checksums make its own. Most objects have the parts that their pickle has.
"""

from __future__ import annotations

import hashlib
import marshal
import pickle
import types
import typing
from collections.abc import Iterable
from typing import Any

import cloudpickle
from cloudpickle.cloudpickle import _extract_code_globals

from rankzero.submit.code_modules import is_sent_by_name, is_sent_by_value, reduce_wrapper
from rankzero.submit.code_source import digest_of_code
from rankzero.values.formats import digest_of
from rankzero.values.pickled import reduce_tensor
from rankzero.values.ref import ResultRef


class Contents:
    """Computes checksums of values, and of the code that they refer to.

    Example:
        >>> Contents().digest_of({"lr": 0.1, "epochs": 3}) == Contents().digest_of({"epochs": 3, "lr": 0.1})
        True
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[bytes, object]] = {}
        """Checksums of objects by their id. The objects are kept, so that no other one gets their id."""
        self._open: dict[int, int] = {}
        """Depth of each value that is being visited, by its id: one may refer to itself."""

    def digest_of(self, value: object) -> str:
        """Returns the checksum of a value. Raises what its pickling raises."""
        return hashlib.sha256(self._visit(value)).hexdigest()

    def _visit(self, value: object) -> bytes:
        """Returns the checksum of a value.

        Objects in a set that refer to each other have another checksum in another order.
        """
        if (plain := _plain(value)) is not None:
            return plain
        if found := self._known.get(id(value)):
            return found[0]
        if id(value) in self._open:
            return b"loop %d" % (len(self._open) - self._open[id(value)])
        self._open[id(value)] = len(self._open)
        try:
            label, parts = self._parts(value)
            done = list(map(self._visit, parts))
        finally:
            del self._open[id(value)]
        if label in _UNORDERED:
            done.sort()
        digest = hashlib.sha256(marshal.dumps([repr(label), *done], 2)).digest()
        self._known[id(value)] = digest, value
        return digest

    def _parts(self, value: Any) -> tuple[object, Iterable[Any]]:
        """Returns the label of a value, and its parts."""
        cls = type(value)
        if cls is ResultRef:
            return ("result", value.format, value.digest), ()
        if cls in (list, tuple, set, frozenset, dict):
            return cls, value.items() if cls is dict else value
        if isinstance(value, (set, frozenset)):
            return "set", [cls, frozenset(value), getattr(value, "__dict__", {})]
        if isinstance(value, typing.TypeVar):
            return "TypeVar", [value.__name__, value.__bound__, value.__constraints__]
        if isinstance(value, pickle.PickleBuffer):
            return digest_of([value.raw()]), ()
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.ModuleType):
            is_sent = is_sent_by_value(value.__name__)
            sent = {name: each for name, each in vars(value).items() if is_sent and name[:2] != "__"}
            return ("module", "" if is_sent else value.__name__), [sent]
        reduced = reduce_tensor(value) or reduce_wrapper(value)
        if reduced is None:
            reducer = cloudpickle.Pickler.dispatch_table.get(cls)
            reduced = reducer(value) if reducer else value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if isinstance(reduced, str):
            return ("global", str(getattr(value, "__module__", "")), reduced), [cls]
        # Items come as iterators.
        return "object", [cls, *(list(part) if hasattr(part, "__next__") else part for part in reduced)]

    def _function(self, function: types.FunctionType) -> tuple[object, Iterable[Any]]:
        if is_sent_by_name(function):
            return ("name", function.__module__, function.__qualname__), ()
        code = function.__code__
        names = function.__globals__.keys() & {*_extract_code_globals(code)}
        used = {name: function.__globals__[name] for name in sorted(names)}
        values = [function.__defaults__, function.__kwdefaults__, vars(function), function.__closure__]
        return ("function", function.__qualname__, digest_of_code(code)), [used, *values]

    def _class(self, cls: type) -> tuple[object, Iterable[Any]]:
        if is_sent_by_name(cls):
            return ("name", cls.__module__, cls.__qualname__), ()
        own = [name for name in sorted(vars(cls)) if name == "__pydantic_fields__" or not name.startswith(_DERIVED)]
        members = {name: vars(cls)[name] for name in own}
        return ("class", cls.__qualname__), [type(cls), cls.__bases__, members]


_UNORDERED = (dict, set, frozenset)

_DERIVED = (
    *("__dict__", "__weakref__", "__module__", "__doc__", "__annot", "__static_attributes__", "__firstlineno__"),
    *("__slotnames__", "__signature__", "__pydantic_", "__private_attributes__", "_abc_", "_backward_cls"),
)
"""Beginnings of the names of members that do not count, or that are made of others, with addresses of this process."""

_PLAIN = frozenset({int, float, str, bool, bytes, type(None)})


def _plain(value: Any) -> bytes | None:
    """Returns the bytes of a plain value, or of a list of those; None for any other value.

    Item by item a million numbers take seconds; this takes 30 ms. Version 2 of marshal writes no references.
    """
    cls = type(value)
    if cls not in _PLAIN and not (cls in (list, tuple) and set(map(type, value)) <= _PLAIN):
        return None
    data = marshal.dumps(value, 2)
    return data if len(data) < 64 else hashlib.sha256(data).digest()
