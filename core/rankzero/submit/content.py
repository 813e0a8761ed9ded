"""Checksums of values by content, equal in every process.

A plain pickle differs between processes: sets have another order, classes of a script have random names. Therefore
`_ContentPickler` writes the parts of such values. Every value has a checksum. If its content cannot be found, the
checksum is that of its plain pickle; if it cannot be pickled at all, that of its type.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import logging
import marshal
import pickle
import types
import typing
from collections.abc import Callable
from typing import Any

import cloudpickle

from rankzero.run.identity import DIGITS
from rankzero.submit.arrays import facts_of_data
from rankzero.submit.imports import globals_of_classes, imports_of_code, submodules_of_code
from rankzero.submit.modules import digest_of_script, is_user_module, is_user_module_name, stable_name
from rankzero.submit.payload import TrainingPickler, named_like, wrapper_of
from rankzero.values.digest import digest_of as digest_of_bytes
from rankzero.values.pickled import beside
from rankzero.values.ref import ResultRef

logger = logging.getLogger(__name__)

MOST_OBJECTS = 300_000
"""Most objects that are visited without a memo, which takes some tenths of a second. Objects that share parts many
times over have exponentially many paths to them."""


def digest_of(*values: Any) -> str:
    """Returns a checksum of plain values and of objects by their attributes, the same in every process.

    Example:
        >>> digest_of({"lr": 0.1, "epochs": 3}) == digest_of({"epochs": 3, "lr": 0.1})
        True
    """
    return digest_with_code(values)[:DIGITS]


class Code:
    """The user's code that values refer to, which counts by its modules and apart from the values.

    Attributes:
        modules: Names of modules that ranks import, with names that are no modules.
        name_of: Returns the name by which a module counts.
    """

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.name_of = functools.cache(stable_name)
        self._waiting: dict[str, list[tuple[str, Any]]] = {}
        self._noted: dict[int, Any] = {}

    def add(self, module: str, name: str, value: Any, key: object) -> None:
        """Adds something that is pickled by value, once for each ``key``; ``name`` orders what a module has."""
        if id(key) not in self._noted:
            # Kept, so that its id stays its own.
            self._noted[id(key)] = key
            self._waiting.setdefault(module, []).append((name, value))

    def digests(self) -> dict[str, str]:
        """Returns a checksum of what was added for each module, with everything that it refers to in the module."""
        found: dict[str, list[str]] = {}
        while self._waiting:
            # What one module refers to in others is added meanwhile.
            module = min(self._waiting)
            added = sorted(self._waiting.pop(module), key=lambda each: each[0])
            digest = digest_with_code([value for _, value in added], f"the code of {module}", self, module)
            found.setdefault(module, []).append(digest)
        return {module: hashlib.sha256(repr(digests).encode()).hexdigest() for module, digests in found.items()}


def digest_with_code(value: object, name: str = "a value", code: Code | None = None, module: str | None = None) -> str:
    """Returns the checksum of a value.

    Args:
        value: Any value, also one that cannot be pickled.
        name: The value's name in the log.
        code: Receives the user's modules, functions and classes that the value refers to, of which only the names count
            for the value; None if all of it counts for the value.
        module: A module whose code counts for the value, even if there is a ``code``.
    """
    problem: Exception | None = None
    # Without a memo equal values are the same whether they are one object or two. A value that refers to itself needs
    # the memo.
    for memo, plain in ((False, False), (True, False), (True, True)):
        try:
            return _digest_with(value, code, module, memo=memo, plain=plain)
        except Exception as error:
            problem = error
    cls = type(value)
    text = (str(problem).splitlines() or [""])[0]
    logger.warning(
        "%s counts by its type alone (%s) when tries are compared, since it cannot be pickled: %s: %s",
        name,
        cls.__qualname__,
        type(problem).__name__,
        text,
    )
    return hashlib.sha256(f"{cls.__module__}.{cls.__qualname__}".encode()).hexdigest()


def _digest_with(value: object, code: Code | None, module: str | None, *, memo: bool, plain: bool) -> str:
    hashed = _Hash()
    buffers: list[memoryview] = []
    _ContentPickler(hashed, beside(buffers), code, module, memo=memo, plain=plain).dump(value)
    for buffer in buffers:
        hashed.write(digest_of_bytes([buffer]).encode())
    return hashed.sha256.hexdigest()


class _Hash:
    """A file that keeps only a checksum of the bytes that are written, since arguments may be large."""

    def __init__(self) -> None:
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return memoryview(data).nbytes


class _ContentPickler(TrainingPickler):
    """Pickles content alone: values whose pickle differs between processes are replaced by their parts."""

    def __init__(
        self,
        file: Any,
        on_buffer: Callable[[pickle.PickleBuffer], bool],
        code: Code | None,
        module: str | None,
        *,
        memo: bool,
        plain: bool,
    ) -> None:
        super().__init__(file, on_buffer)
        self._code, self._in_module = code, module
        if code is not None:
            self.needed = code.modules
        self.fast = not memo
        self._memo = memo
        # Dicts and objects are pickled as plain pickle does if their parts cannot be found or nest too deeply.
        self._plain = plain
        self._seen: dict[int, tuple[int, object]] = {}
        self._visited = 0

    def persistent_id(self, value: Any) -> Any:
        self._visited += 1
        if self._visited > MOST_OBJECTS and not self._memo:
            raise ValueError(f"more than {MOST_OBJECTS} objects")
        cls = type(value)
        if cls is ResultRef:
            return "result", value.format, value.digest
        if cls in (list, tuple) and len(value) >= _MANY and _is_plain(value):
            # Item by item a million numbers take seconds; this takes 30 ms. Version 2 of marshal writes no references.
            return cls.__name__, hashlib.sha256(marshal.dumps(value, 2)).hexdigest()
        if cls is dict:
            return None if self._plain else self._contents(value, self._pairs)
        if isinstance(value, (set, frozenset)):
            # The order of the items differs between processes.
            items = sorted(digest_with_code(item, code=self._code, module=self._in_module) for item in value)
            return cls, items, getattr(value, "__dict__", {})
        if isinstance(value, typing.TypeVar):
            variance = value.__covariant__, value.__contravariant__
            return "TypeVar", value.__name__, value.__bound__, value.__constraints__, variance
        if isinstance(value, types.FunctionType):
            return None if self._is_named(value) else self._apart(value) or self._once(value, self._function)
        if isinstance(value, type):
            return None if self._is_named(value) else self._apart(value) or self._once(value, self._class)
        if isinstance(value, types.ModuleType):
            return self._module(value)
        return None if self._plain else self._object(value)

    def _object(self, value: Any) -> Any:
        if facts := facts_of_data(value):
            return self._contents(value, facts)
        # The class of a script travels by value, under a random name.
        return None if self._is_named(type(value)) else self._contents(value, self._instance)

    def _contents(self, value: Any, facts: Any) -> Any:
        return self._once(value, facts) if self._memo else facts(value)

    @staticmethod
    def _pairs(value: dict[Any, Any]) -> Any:
        """Returns the items sorted by key, or in their order if the keys cannot be compared."""
        try:
            return "dict", sorted(value.items(), key=lambda item: item[0])
        except Exception:
            # A comparison may raise anything: that of two tensors raises RuntimeError.
            return "dict", list(value.items())

    @staticmethod
    def _instance(value: Any) -> Any:
        """Returns the parts of an object that pickle would write: constructor arguments, state, items."""
        if isinstance(value, enum.Enum):
            return type(value), value.value
        reduced = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if isinstance(reduced, str):
            return type(value), reduced
        # Items come as iterators.
        parts = [list(part) if hasattr(part, "__next__") else part for part in reduced[1:]]
        return type(value), reduced[0], parts

    def _module(self, module: types.ModuleType) -> Any:
        """Returns the digest of the source of a user's module that ranks cannot import; None for any other module."""
        name, path = module.__name__, getattr(module, "__file__", None)
        if not is_user_module_name(name) or self.travels(name) or not isinstance(path, str):
            return None
        digest, imported = digest_of_script(path)
        self.needed |= imported
        noted = self._note(name, "", module, module)
        return ("code", noted) if noted else ("module", digest)

    def _is_named(self, value: Any) -> bool:
        """Returns True if ranks import the function or class by its name; else it travels by value."""
        module, name = getattr(value, "__module__", None), value.__qualname__
        if module in ("__main__", "__mp_main__") or "<locals>" in name:
            return False
        if not isinstance(module, str):
            # Such as a function that `exec` made in a namespace without a name.
            return False
        if isinstance(value, type) and not _is_written_in_python(value):
            # A class of the interpreter or an installed package, whatever its name: Cython's classes name a module
            # without a file, as the classes of a module that a user made by hand do.
            return True
        # Registers modules that are pickled by value, as for the payload. An installed package may also have made a
        # class for the user, which has the package's name and cannot be imported from it.
        travels = self.travels(module)
        if isinstance(value, types.FunctionType) and wrapper_of(value):
            # Its name belongs to the wrapper, from which ranks take it.
            return travels
        return bool(cloudpickle.cloudpickle._should_pickle_by_reference(value))

    def _note(self, module: object, name: str, value: Any, key: object) -> str | None:
        """Notes code that counts for its own module, and returns the module's name; None for any other code."""
        if self._code is None or module == self._in_module or not isinstance(module, str):
            return None
        if module != "__main__" and not is_user_module_name(module):
            return None
        self._code.add(module, name, value, key)
        return self._code.name_of(module)

    def _apart(self, value: Any) -> Any:
        """Notes a function or class whose code counts for its own module, and returns its name; None for any other."""
        module, name = value.__module__, value.__qualname__
        found = named_like(value, str(module))
        # A cell of a notebook that runs again makes a class again, and objects keep the class that they had.
        if found is value or (isinstance(found, type) and isinstance(value, type)):
            noted = self._note(module, name, value, value)
            return noted and ("code", noted, name)
        return None

    def _once(self, value: Any, facts: Any) -> Any:
        """Returns the facts of a value the first time, and later its number, which ends reference cycles."""
        if id(value) in self._seen:
            return "seen", self._seen[id(value)][0]
        # Kept, so that its id stays its own.
        self._seen[id(value)] = (len(self._seen), value)
        return facts(value)

    def _function(self, function: types.FunctionType) -> Any:
        code = function.__code__
        self.needed |= imports_of_code(code, function.__globals__.get("__package__"))
        names = {*cloudpickle.cloudpickle._extract_code_globals(code), *globals_of_classes(code)}
        cells = [_content(cell) for cell in function.__closure__ or ()]
        used = [(name, function.__globals__[name]) for name in sorted(names) if name in function.__globals__]
        reached = [value for _, value in used] + [value for content in cells for value in content]
        # Installed packages, which do not count, would cost a walk over all loaded modules each.
        modules = [value for value in reached if isinstance(value, types.ModuleType)]
        reached = [module.__name__ for module in modules if _may_be_user_s(module)]
        self.needed |= submodules_of_code(code, reached)
        name, module = function.__qualname__, function.__globals__.get("__name__")
        body: Any = (facts_of_code(code), used)
        line = f"{name} {code.co_firstlineno:06}"
        if self._in_module is not None and self._note(module, line, body, code):
            # Such as the code that a decorator of another module makes.
            body = None
        return name, body, function.__defaults__, function.__kwdefaults__, vars(function), cells

    @staticmethod
    def _class(cls: type) -> Any:
        members = [
            (name, _of_pydantic(name, member) if name in _MADE_BY_PYDANTIC else _unwrapped(member))
            for name, member in sorted(vars(cls).items())
            if name in _MADE_BY_PYDANTIC or (name not in _NOT_OF_A_CLASS and not name.startswith(_DERIVED))
        ]
        descriptors = (types.GetSetDescriptorType, types.MemberDescriptorType)
        told = [(name, member) for name, member in members if not isinstance(member, descriptors)]
        return cls.__qualname__, type(cls), cls.__bases__, told


def _is_written_in_python(cls: type) -> bool:
    """Returns True for a class that a ``class`` statement or a call of `type` has made."""
    return bool(cls.__flags__ & _HEAP_TYPE) and not cls.__flags__ & _IMMUTABLE_TYPE


_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8
"""``Py_TPFLAGS_HEAPTYPE`` and ``Py_TPFLAGS_IMMUTABLETYPE`` of CPython."""

_NOT_OF_A_CLASS = frozenset(
    {
        *("__dict__", "__weakref__", "__module__", "__doc__", "__annotations__"),
        *("__static_attributes__", "__firstlineno__", "__annotate_func__", "__annotations_cache__"),
        # Made when an object is pickled for the first time.
        "__slotnames__",
        # torch makes it of a subclass of `torch.autograd.Function`, with a number of this process.
        "_backward_cls",
    }
)


_DERIVED = ("_abc_", "__signature__", "__pydantic_")
"""Beginnings of the names of members that are made of others, with addresses of this process in them."""

_MADE_BY_PYDANTIC = ("__pydantic_fields__", "__pydantic_decorators__", "__private_attributes__")
"""Members with the parts that pydantic has taken out of the body of a class."""


def _of_pydantic(name: str, member: Any) -> Any:
    """Returns the part of a member that is neither an address of this process nor made when the class is used."""
    if name == "__private_attributes__":
        return {key: (each.default, each.default_factory) for key, each in member.items()}
    if name == "__pydantic_decorators__":
        # The functions are members of the class, too.
        kinds = {each.name: getattr(member, each.name) for each in dataclasses.fields(member)}
        return {kind: {key: each.info for key, each in found.items()} for kind, found in kinds.items()}
    return member


def _may_be_user_s(module: types.ModuleType) -> bool:
    """Returns False for an installed module. A package without ``__init__.py`` has no file, and may be the user's."""
    return is_user_module(module) or (getattr(module, "__file__", None) is None and hasattr(module, "__path__"))


def _unwrapped(member: Any) -> Any:
    """Returns the functions in a static method, class method or property; any other member unchanged."""
    if isinstance(member, (staticmethod, classmethod)):
        return type(member).__name__, member.__func__
    return (member.fget, member.fset, member.fdel) if isinstance(member, property) else member


_MANY = 100
"""Items from which on a list of plain values is hashed as a whole."""

_PLAIN = frozenset({int, float, str, bool, bytes, type(None)})


def _is_plain(value: Any) -> bool:
    """Returns True for a list of plain values, or of rows of plain values."""
    kinds = set(map(type, value))
    return kinds <= _PLAIN or (kinds <= {list, tuple} and all(set(map(type, row)) <= _PLAIN for row in value))


def _content(cell: types.CellType) -> Any:
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def facts_of_code(code: types.CodeType) -> tuple[Any, ...]:
    """Returns the instructions, constants and names of code, without file names and line numbers."""
    constants = [facts_of_code(const) if isinstance(const, types.CodeType) else const for const in code.co_consts]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    # The exception table has the ranges of "try" blocks.
    return code.co_code, constants, names, counts, code.co_exceptiontable
