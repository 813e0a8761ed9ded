"""Checksums of values and of code that is sent by value, by content and equal in every process.

A pickle differs between processes: sets have another order, classes of a script have random names. Here a value is a
label and its parts, whose checksums make its own. Code that is sent by value counts apart from the values that refer to
it, so that an edited class leaves the arguments of its kind as they are.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import pickle
import sys
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

import cloudpickle

from rankzero.submit.code_modules import is_sent_by_name, is_sent_by_value, is_user_module, spec_of
from rankzero.submit.code_source import digest_of_code, globals_of_classes
from rankzero.submit.pack_pickler import reduce_wrapper
from rankzero.values.formats import digest_of
from rankzero.values.ref import ResultRef


class _Parts(typing.NamedTuple):
    """A value as the sum of a label and of its parts. Their order does not count in a dict or set."""

    label: object
    parts: Iterable[Any] = ()
    is_ordered: bool = True


class Contents:
    """Computes checksums of values, and collects the code that they refer to.

    Example:
        >>> Contents().digest_of({"lr": 0.1, "epochs": 3}) == Contents().digest_of({"epochs": 3, "lr": 0.1})
        True
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[bytes, object]] = {}
        """Checksums of objects by their id. The objects are kept, so that no other one gets their id."""
        self._open: dict[int, int] = {}
        """Depth of each value that is being visited, by its id: one may refer to itself."""
        self._waiting: list[_Parts] = []
        self._noted: dict[int, object] = {}

    def digest_of(self, value: object) -> str:
        """Returns the checksum of a value. Raises what its pickling raises."""
        return hashlib.sha256(self._visit(value)).hexdigest()

    def code(self) -> str:
        """Returns the checksum of all code that is sent by value, as far as the values refer to it."""
        found = set[bytes]()
        while self._waiting:
            found.add(self._visit(self._waiting.pop()))
        return hashlib.sha256(b"".join(sorted(found))).hexdigest()

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
            parts = value if isinstance(value, _Parts) else self._parts(value)
            done = list(map(self._visit, parts.parts))
        finally:
            del self._open[id(value)]
        digest = hashlib.sha256(marshal.dumps([repr(parts.label), *(done if parts.is_ordered else sorted(done))], 2))
        self._known[id(value)] = digest.digest(), value
        return digest.digest()

    def _parts(self, value: Any) -> _Parts:
        cls = type(value)
        if cls is ResultRef:
            return _Parts(("result", value.format, value.digest))
        if cls is list or cls is tuple:
            return _Parts(cls.__name__, value)
        if cls is dict:
            return _Parts("dict", value.items(), is_ordered=False)
        if isinstance(value, (set, frozenset)):
            return _Parts("set", [cls, _Parts("items", list(value), is_ordered=False), getattr(value, "__dict__", {})])
        if isinstance(value, typing.TypeVar):
            return _Parts("TypeVar", [value.__name__, value.__bound__, value.__constraints__])
        if isinstance(value, pickle.PickleBuffer):
            return _Parts(digest_of([value.raw()]))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.ModuleType):
            return self._module(value)
        for package, name, facts in _DATA:
            kind = getattr(sys.modules.get(package), name, None)
            if kind is not None and isinstance(value, kind) and (found := facts(value)) is not None:
                return _Parts("data", [found])
        reducer = cloudpickle.Pickler.dispatch_table.get(cls)
        reduced = reduce_wrapper(value) or (reducer(value) if reducer else value.__reduce_ex__(pickle.HIGHEST_PROTOCOL))
        if isinstance(reduced, str):
            return _Parts(("global", str(getattr(value, "__module__", "")), reduced), [cls])
        # Items come as iterators.
        make, arguments, *rest = (list(part) if hasattr(part, "__next__") else part for part in reduced)
        return _Parts("object", [cls, make, arguments, *map(_without_numbers, rest)])

    def _note(self, module: object, name: str, key: object, parts: _Parts) -> _Parts | None:
        """Notes code of the user that counts apart, and returns its name; None for lambdas and what functions made."""
        if "<" in name or not isinstance(module, str) or not (module == "__main__" or is_user_module(module)):
            return None
        # No module can be found by the synthetic name of a DAG file.
        file = None if spec_of(module.partition(".")[0]) else getattr(sys.modules.get(module), "__file__", None)
        label = ("code", os.path.basename(file) if isinstance(file, str) else module, name)
        if id(key) not in self._noted:
            # Kept, so that its id stays its own.
            self._noted[id(key)] = key
            self._waiting.append(_Parts(label, [parts]))
        return _Parts(label)

    def _function(self, function: types.FunctionType) -> _Parts:
        if is_sent_by_name(function):
            return _Parts(("name", function.__module__, function.__qualname__))
        code, names = function.__code__, function.__globals__
        used = {*cloudpickle.cloudpickle._extract_code_globals(code), *globals_of_classes(code)} & names.keys()
        body = _Parts(("body", digest_of_code(code)), [(name, names[name]) for name in sorted(used)])
        noted = self._note(names.get("__name__"), code.co_qualname, code, body)
        cells = [_content(cell) for cell in function.__closure__ or ()]
        values = [function.__defaults__, function.__kwdefaults__, vars(function), cells]
        return _Parts(("function", function.__qualname__), [noted or body, *values])

    def _class(self, cls: type) -> _Parts:
        module, name = cls.__module__, cls.__qualname__
        if is_sent_by_name(cls):
            return _Parts(("name", module, name))
        own = [each for each in sorted(vars(cls)) if each == "__pydantic_fields__" or not each.startswith(_DERIVED)]
        members = [(each, _unwrapped(vars(cls)[each])) for each in own]
        body = _Parts(("class", name), [type(cls), cls.__bases__, members])
        return self._note(module, name, cls, body) or body

    def _module(self, module: types.ModuleType) -> _Parts:
        name = module.__name__
        if not is_sent_by_value(name):
            return _Parts(("module", name))
        sent = {name: each for name, each in vars(module).items() if name[:2] != "__"}
        body = _Parts("module", [sent])
        return self._note(name, "", module, body) or body


_DERIVED = (
    *("__dict__", "__weakref__", "__module__", "__doc__", "__annot", "__static_attributes__", "__firstlineno__"),
    *("__slotnames__", "__signature__", "__pydantic_", "__private_attributes__", "_abc_", "_backward_cls"),
)
"""Beginnings of the names of members that do not count, or that are made of others, with addresses of this process."""


def _unwrapped(member: Any) -> Any:
    """Returns the functions in a static method, class method or property; any other member unchanged."""
    if isinstance(member, (staticmethod, classmethod)):
        return type(member).__name__, member.__func__
    if isinstance(member, (types.GetSetDescriptorType, types.MemberDescriptorType)):
        return type(member).__name__
    return (member.fget, member.fset, member.fdel) if isinstance(member, property) else member


_PLAIN = frozenset({int, float, str, bool, bytes, type(None)})


def _plain(value: Any) -> bytes | None:
    """Returns the bytes of a plain value, or of a list of those or of rows of those; None for any other value.

    Item by item a million numbers take seconds; this takes 30 ms. Version 2 of marshal writes no references.
    """
    cls = type(value)
    if cls is list or cls is tuple:
        kinds = set(map(type, value))
        if not (kinds <= _PLAIN or (kinds <= {list, tuple} and all(set(map(type, row)) <= _PLAIN for row in value))):
            return None
    elif cls not in _PLAIN:
        return None
    data = marshal.dumps(value, 2)
    return data if len(data) < 64 else hashlib.sha256(data).digest()


def _content(cell: types.CellType) -> Any:
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _without_numbers(state: Any) -> Any:
    """Returns the state of an object, without the numbers that torch gives to all hooks of a process."""
    hooks = {key: each for key, each in state.items() if "_hooks" in str(key)} if type(state) is dict else {}
    numbered = {key: each for key, each in hooks.items() if isinstance(each, dict) and {*map(type, each)} == {int}}
    return {**state, **{key: [*each.values()] for key, each in numbered.items()}} if numbered else state


# -- data --------------------------------------------------------------------------------------


def _array(value: Any) -> Any:
    """Returns type, shape and bytes of an array: its pickle also depends on strides."""
    import numpy

    if value.dtype.hasobject or type(value) is not numpy.ndarray:
        return None
    data = numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8)
    return "array", value.dtype, value.shape, digest_of([data.data])


def _frame(value: Any) -> Any:
    """Returns the columns of a DataFrame of pandas, or the rows, type and names of a Series or index.

    Their pickles also depend on what was read from them.
    """
    import pandas

    if type(value) is pandas.DataFrame:
        return "frame", value.columns, value.index, value.attrs, [value.iloc[:, at] for at in range(value.shape[1])]
    if type(value) is not pandas.Series and not isinstance(value, pandas.Index):
        # A subclass may hold more.
        return None
    kind = value.dtype
    rows = value.tolist() if kind.kind == "O" else pandas.util.hash_pandas_object(value, index=False).to_numpy()
    is_index = isinstance(value, pandas.Index)
    facts = [*value.names, *getattr(value, "dtypes", ())] if is_index else [value.name, value.index, value.attrs]
    return "rows", str(kind), getattr(kind, "categories", None), getattr(kind, "ordered", None), facts, rows


def _tensor(value: Any) -> Any:
    """Returns a tensor's type, shape, numbers and attributes: its pickle also depends on strides and shared memory."""
    import torch

    cls = type(value)
    reduce: Any = cls.__reduce_ex__
    if reduce not in (torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__):
        # A subclass with its own pickling.
        return None
    try:
        plain = value.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg().contiguous()
        # Not `reshape`, which keeps any stride of a single element.
        data = pickle.PickleBuffer(plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy())
    except (RuntimeError, TypeError):
        # Some kinds of tensors lack these operations.
        return None
    facts = (str(value.dtype), tuple(value.shape), value.requires_grad, digest_of([data.raw()]))
    return "tensor", cls, vars(value), *facts


_DATA: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("torch", "Tensor", _tensor),
    ("torch", "UntypedStorage", lambda storage: ("storage", digest_of([bytes(storage)]))),
    ("torch", "TypedStorage", lambda storage: (str(storage.dtype), storage._untyped_storage)),
    ("numpy", "ndarray", _array),
    *(("pandas", name, _frame) for name in ("DataFrame", "Series", "Index")),
)
"""Package and name of each class whose objects count by other facts than their pickle, and these facts."""
