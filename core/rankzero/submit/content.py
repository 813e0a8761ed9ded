"""A checksum of values by content, the same in every process: what a pickle is not.

In place of what is pickled in another way in every process stands what it consists of.
"""

from __future__ import annotations

import enum
import hashlib
import marshal
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import cloudpickle

from rankzero.submit.imports import globals_of_classes, imports_of_code
from rankzero.submit.modules import is_user_module_name
from rankzero.submit.payload import TrainingPickler
from rankzero.submit.sources import digest_of_script
from rankzero.values.digest import digest_of as digest_of_bytes
from rankzero.values.envelope import beside
from rankzero.values.ref import ResultRef

DIGITS = 16
"""Of a checksum that people read."""


def digest_of(*values: Any) -> str:
    """A checksum of plain values and of objects by their attributes, the same in every process.

    Example:
        >>> digest_of({"lr": 0.1, "epochs": 3}) == digest_of({"epochs": 3, "lr": 0.1})
        True
    """
    return digest_with_modules(values)[0][:DIGITS]


def digest_with_modules(value: object) -> tuple[str, set[str]]:
    """The checksum of a value, and the modules that it needs."""
    try:
        # Without a memo equal values are the same whether they are one object or two.
        return _digest_with(value, memo=False)
    except (RecursionError, ValueError, pickle.PicklingError):
        # What refers to itself needs it.
        return _digest_with(value, memo=True)


def _digest_with(value: object, *, memo: bool) -> tuple[str, set[str]]:
    hashed = _Hash()
    buffers: list[memoryview] = []
    pickler = _ContentPickler(hashed, beside(buffers), memo=memo)
    pickler.dump(value)
    for buffer in buffers:
        hashed.write(digest_of_bytes([buffer]).encode())
    return hashed.sha256.hexdigest(), pickler.needed


class _Hash:
    """A file that keeps a checksum of what is written, and nothing else: arguments may be large."""

    def __init__(self) -> None:
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return memoryview(data).nbytes


class _ContentPickler(TrainingPickler):
    """Pickles content alone: in place of what is pickled in another way in every process stands what it consists of."""

    def __init__(self, file: Any, on_buffer: Callable[[pickle.PickleBuffer], bool], *, memo: bool) -> None:
        super().__init__(file, on_buffer)
        self.fast = not memo
        self._memo = memo
        self._seen: dict[int, tuple[int, object]] = {}

    def persistent_id(self, value: Any) -> Any:
        cls = type(value)
        if cls is ResultRef:
            return "result", value.format, value.digest
        if cls in (list, tuple) and len(value) >= _MANY and _is_plain(value):
            # Item by item a million numbers take seconds; this takes 30 ms. This version writes no references.
            return cls.__name__, hashlib.sha256(marshal.dumps(value, 2)).hexdigest()
        if cls is dict:
            return self._contents(value, self._pairs)
        if cls in (set, frozenset):
            return cls.__name__, sorted(map(self._digest_of_item, value))
        if isinstance(value, types.FunctionType):
            return None if self._is_named(value) else self._once(value, self._function)
        if isinstance(value, type):
            return None if self._is_named(value) else self._once(value, self._class)
        if isinstance(value, types.ModuleType):
            return self._module(value)
        if _is_tensor(value):
            return self._contents(value, _tensor)
        # Its class travels by value, under a random name.
        return None if self._is_named(cls) else self._contents(value, self._instance)

    def _digest_of_item(self, item: Any) -> str:
        digest, needed = digest_with_modules(item)
        self.needed |= needed
        return digest

    def _contents(self, value: Any, facts: Any) -> Any:
        return self._once(value, facts) if self._memo else facts(value)

    @staticmethod
    def _pairs(value: dict[Any, Any]) -> Any:
        """The items in an order of their own, where they have one."""
        try:
            return "dict", sorted(value.items(), key=lambda item: item[0])
        except TypeError:
            return "dict", list(value.items())

    @staticmethod
    def _instance(value: Any) -> Any:
        """What pickle would write of an object: arguments of its making, state, items."""
        if isinstance(value, enum.Enum):
            return type(value), value.value
        reduced = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if isinstance(reduced, str):
            return type(value), reduced
        # Items come as iterators.
        parts = [list(part) if hasattr(part, "__next__") else part for part in reduced[1:]]
        return type(value), reduced[0], parts

    def _module(self, module: types.ModuleType) -> Any:
        """A user's module that travels by value counts by its source, wherever that lies."""
        name, path = module.__name__, getattr(module, "__file__", None)
        if not is_user_module_name(name) or self.travels(name) or not isinstance(path, str):
            return None
        digest, imported = digest_of_script(path)
        self.needed |= imported
        return "module", digest

    def _is_named(self, value: Any) -> bool:
        """True if ranks import the function or class by its name; else it goes by value."""
        module, name = getattr(value, "__module__", None), value.__qualname__
        if module in ("__main__", "__mp_main__") or "<locals>" in name:
            return False
        if not isinstance(module, str) or (isinstance(value, type) and not is_user_module_name(module)):
            # Of an interpreter or an installed package, whatever its name says.
            return True
        # Registers what goes by value, as it does for the payload.
        self.travels(module)
        return bool(cloudpickle.cloudpickle._should_pickle_by_reference(value))

    def _once(self, value: Any, facts: Any) -> Any:
        """The facts of a function or class; its number if they are on their way: it refers to itself."""
        if id(value) in self._seen:
            return "seen", self._seen[id(value)][0]
        # Kept, so that its id stays its own.
        self._seen[id(value)] = (len(self._seen), value)
        return facts(value)

    def _function(self, function: types.FunctionType) -> Any:
        self.needed |= imports_of_code(function.__code__, function.__globals__.get("__package__"))
        code = function.__code__
        names = {*cloudpickle.cloudpickle._extract_code_globals(code), *globals_of_classes(code)}
        return (
            function.__qualname__,
            _code_facts(code),
            function.__defaults__,
            function.__kwdefaults__,
            vars(function),
            [_content(cell) for cell in function.__closure__ or ()],
            [(name, function.__globals__[name]) for name in sorted(names) if name in function.__globals__],
        )

    @staticmethod
    def _class(cls: type) -> Any:
        members = [
            (name, _unwrapped(member))
            for name, member in sorted(vars(cls).items())
            if name not in _NOT_OF_A_CLASS and not name.startswith("_abc_")
        ]
        descriptors = (types.GetSetDescriptorType, types.MemberDescriptorType)
        told = [(name, member) for name, member in members if not isinstance(member, descriptors)]
        return cls.__qualname__, type(cls), cls.__bases__, told


_NOT_OF_A_CLASS = frozenset(
    {
        *("__dict__", "__weakref__", "__module__", "__doc__", "__annotations__"),
        *("__static_attributes__", "__firstlineno__", "__annotate_func__", "__annotations_cache__"),
    }
)


def _unwrapped(member: Any) -> Any:
    """The functions of a method or property."""
    if isinstance(member, (staticmethod, classmethod)):
        return type(member).__name__, member.__func__
    return (member.fget, member.fset, member.fdel) if isinstance(member, property) else member


_MANY = 100
"""Items from which a list of plain values is taken as a whole."""

_PLAIN = frozenset({int, float, str, bool, bytes, type(None)})


def _is_plain(value: Any) -> bool:
    """True for plain values, and for rows of them."""
    kinds = set(map(type, value))
    return kinds <= _PLAIN or (kinds <= {list, tuple} and all(set(map(type, row)) <= _PLAIN for row in value))


def _content(cell: types.CellType) -> Any:
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _code_facts(code: types.CodeType) -> tuple[Any, ...]:
    """What code does: without the names of files and the numbers of lines."""
    constants = [_code_facts(const) if isinstance(const, types.CodeType) else const for const in code.co_consts]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    return code.co_code, constants, names, counts


def _is_tensor(value: Any) -> bool:
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(value, tensor)


def _tensor(value: Any) -> Any:
    """A tensor by type, shape, numbers and attributes: its pickle holds memory in an order, and copies, of its own."""
    import torch

    cls = type(value)
    reduce: Any = cls.__reduce_ex__
    if reduce not in (torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__):
        # There is more to it.
        return None
    try:
        plain = value.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg().contiguous()
        # Not `reshape`, which keeps any stride of a single element.
        data = pickle.PickleBuffer(plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy())
    except (RuntimeError, TypeError):
        # One of the kinds of tensors that do not have all that others have.
        return None
    facts = (str(value.dtype), tuple(value.shape), value.requires_grad, digest_of_bytes([data.raw()]))
    return "tensor", cls, vars(value), *facts
