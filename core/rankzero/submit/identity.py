"""What makes a training the same: its code by content, its arguments by content, the number of its ranks.

Not part of it: inodes, times, retries, where a value lies, comments and the layout of sources. A run of another
identity never lends its checkpoints or its result; a run of the same one never loses them.
"""

from __future__ import annotations

import enum
import hashlib
import os
import pickle
import sys
import types
from typing import Any

import cloudpickle

from rankzero.submit.modules import imports_of_code, is_user_module_name
from rankzero.submit.payload import TrainingPickler, resolve_training, search_path
from rankzero.submit.sources import digest_of_modules, digest_of_script
from rankzero.values.ref import ResultRef

_DIGITS = 16


def identity_of(
    train: object, args: tuple[Any, ...], kwargs: dict[str, Any], world_size: int, code_version: str | None = None
) -> str:
    """Names a training: the same in every process for the same code, arguments and world size.

    The code is a script, or a function with what it refers to, and the user's modules that these import. A function
    that travels by reference counts by its module.

    Args:
        train: As for `Launcher.run`.
        args: Its positional arguments. A `ResultRef` counts by the checksum of its file.
        kwargs: Its keyword arguments.
        world_size: Number of ranks.
        code_version: Stands for all code, which is not looked at then.

    Returns:
        Hexadecimal digits; empty for what cannot be pickled: its submission says what is wrong with it.

    Raises:
        InvalidJobError: ``train`` names no script or function.
    """
    resolved = resolve_training(train)
    try:
        code = _code_of(resolved) if code_version is None else ("version", code_version)
        arguments, modules = _digest((args, kwargs))
    except Exception:
        return ""
    sources = digest_of_modules(modules) if code_version is None else ""
    return hashlib.sha256(repr((code, arguments, sources, world_size)).encode()).hexdigest()[:_DIGITS]


def _code_of(train: Any) -> tuple[str, ...]:
    if isinstance(train, str):
        digest, imported = digest_of_script(train)
        with search_path(os.path.dirname(train)):
            return "script", digest, digest_of_modules(imported)
    digest, modules = _digest(train)
    return "function", digest, digest_of_modules(modules)


def digest_of(*values: Any) -> str:
    """A checksum of plain values and of objects by their attributes, the same in every process.

    Example:
        >>> digest_of({"lr": 0.1, "epochs": 3}) == digest_of({"epochs": 3, "lr": 0.1})
        True
    """
    return _digest(values)[0][:_DIGITS]


def _digest(value: object) -> tuple[str, set[str]]:
    """The checksum of a value, and the modules that it needs."""
    try:
        # Without a memo equal values are the same whether they are one object or two.
        return _digest_with(value, memo=False)
    except (RecursionError, ValueError):
        # What refers to itself needs it.
        return _digest_with(value, memo=True)


def _digest_with(value: object, *, memo: bool) -> tuple[str, set[str]]:
    hashed = _Hash()
    pickler = _ContentPickler(hashed)
    pickler.fast = not memo
    pickler.dump(value)
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

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._seen: dict[int, tuple[int, object]] = {}

    def persistent_id(self, value: Any) -> Any:
        cls = type(value)
        if cls is ResultRef:
            return "result", value.format, value.sha256
        if cls is dict:
            return self._pairs(value)
        if cls in (set, frozenset):
            return cls.__name__, sorted(digest_of(item) for item in value)
        if isinstance(value, types.FunctionType):
            return None if self._is_named(value) else self._once(value, self._function)
        if isinstance(value, type):
            return None if self._is_named(value) else self._once(value, self._class)
        if _is_tensor(value):
            return _tensor(value)
        if not self._is_named(cls):
            # Its class travels by value, under a random name.
            state = value.value if isinstance(value, enum.Enum) else getattr(value, "__dict__", None)
            slots = [getattr(value, name, None) for name in getattr(cls, "__slots__", ())]
            return cls, state, slots
        return None

    @staticmethod
    def _pairs(value: dict[Any, Any]) -> Any:
        """The items in an order of their own; None leaves a dict that has no such order to pickle."""
        try:
            return "dict", sorted(value.items(), key=lambda item: item[0])
        except TypeError:
            return None

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
        names = _names_of(function.__code__)
        return (
            function.__qualname__,
            _code_facts(function.__code__),
            function.__defaults__,
            function.__kwdefaults__,
            [_content(cell) for cell in function.__closure__ or ()],
            [(name, function.__globals__[name]) for name in sorted(names) if name in function.__globals__],
        )

    @staticmethod
    def _class(cls: type) -> Any:
        hidden = {"__dict__", "__weakref__", "__module__", "__doc__", "__annotations__", "__static_attributes__"}
        members = [(name, member) for name, member in sorted(vars(cls).items()) if name not in hidden]
        unwrapped = [
            (name, getattr(member, "__func__", None) or getattr(member, "fget", None) or member)
            for name, member in members
            if not isinstance(member, (types.GetSetDescriptorType, types.MemberDescriptorType))
            and not name.startswith("_abc_")
        ]
        return cls.__qualname__, cls.__bases__, unwrapped


def _content(cell: types.CellType) -> Any:
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _names_of(code: types.CodeType) -> set[str]:
    """Names that code, and the code nested in it, may look up in its module."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names_of(constant)
    return found


def _code_facts(code: types.CodeType) -> tuple[Any, ...]:
    """What code does: without the names of files and the numbers of lines."""
    constants = [_code_facts(const) if isinstance(const, types.CodeType) else const for const in code.co_consts]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    return code.co_code, constants, names, counts


def _is_tensor(value: Any) -> bool:
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and type(value) is tensor and value.device.type == "cpu"


def _tensor(value: Any) -> Any:
    """A tensor by type, shape and numbers: its pickle holds the whole of a storage of which it may be a part."""
    import torch

    try:
        plain = value.detach().contiguous().reshape(-1)
        data = pickle.PickleBuffer(plain.view(torch.uint8).numpy())
    except (RuntimeError, TypeError):
        # One of the kinds of tensors that do not have all that others have.
        return None
    return "tensor", str(value.dtype), tuple(value.shape), value.requires_grad, hashlib.sha256(data).hexdigest()
