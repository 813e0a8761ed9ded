"""Function or script and arguments to bytes, with the user's modules they need.

The user's own modules (everything that is not installed) need not exist where the ranks run:

* a module that can be imported by its name travels as source in ``modules.zip``, with the modules
  it imports in turn; its functions and classes are pickled by reference, so that each exists once;
* ``__main__``, notebooks, DAG files under synthetic names, and modules that import an orchestrator,
  which executors do not have, are pickled by value, as far as the function refers to them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import itertools
import os
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from rankzero.errors import InvalidJobError
from rankzero.submit.modules import (
    Shipped,
    imports_of_code,
    imports_of_tree,
    is_user_module,
    parse,
    travels_as_source,
    zip_modules,
)
from rankzero.values.envelope import Part, beside, pack
from rankzero.values.ref import ResultRef, map_refs
from rankzero.values.tensors import Tensors

# cloudpickle's registry of by-value modules is global to the process.
_REGISTRY_LOCK = threading.RLock()


@dataclass(frozen=True)
class Payload:
    """What the workers get.

    Attributes:
        name: Of the function or script, for people.
        data: The pickle of function or script and arguments, as `envelope.pack` makes it.
        modules: The user modules that travel with it, or None.
        refs: The `ResultRef` objects among the arguments.
    """

    name: str
    data: list[Part]
    modules: Shipped | None = None
    refs: list[ResultRef] = field(default_factory=list)


def build(train: object, args: tuple[Any, ...], kwargs: dict[str, Any], restart_on: object = ()) -> Payload:
    """Makes the payload.

    Args:
        train: A callable, ``"path/to/script.py"``, a path object, or ``"package.module:function"``.
        args: Positional arguments. `ResultRef` in them, also nested, are opened in the workers.
        kwargs: Keyword arguments; a script takes none.
        restart_on: Of `Launcher`; a rank that fails loads it.

    Raises:
        InvalidJobError: ``train`` is none of these, the arguments do not fit its signature,
            or something cannot be pickled; the message names it.
    """
    refs: list[ResultRef] = []
    map_refs([list(args), dict(kwargs)], refs.append)
    function = resolve_training(train)
    extra, needed = _pickle_restart_on(restart_on)
    if isinstance(function, str):
        return _build_script(function, args, kwargs, refs, extra, needed)
    _check_callable(function, args, kwargs)
    assert callable(function)
    parts = {"kind": "function", "name": _name_of(function), "function": function, "args": args, "kwargs": kwargs}
    data, modules = _pickle(parts | extra, lambda: _find_culprit(function, args, kwargs), needed)
    return Payload(_name_of(function), data, modules, refs)


def _pickle_restart_on(restart_on: object) -> tuple[dict[str, bytes], set[str]]:
    """The part of the payload, and the user's modules that it needs."""
    if not restart_on:
        return {}, set()
    buffer = io.BytesIO()
    pickler = TrainingPickler(buffer)
    try:
        pickler.dump(restart_on)
    except Exception as error:
        raise InvalidJobError(f"restart_on={restart_on!r} cannot be pickled: {error}") from error
    return {"restart_on": buffer.getvalue()}, pickler.needed


def resolve_training(train: object) -> Any:
    """What is run: the absolute path of a script, else the object that shall be called.

    Raises:
        InvalidJobError: there is no such script, module or function.
    """
    if isinstance(train, os.PathLike) or (isinstance(train, str) and not is_module_reference(train)):
        path = os.fspath(train)
        absolute = os.path.abspath(os.path.expanduser(path))
        if os.path.isdir(absolute):
            raise InvalidJobError(f"train={path!r} is a directory; give the script in it")
        if not os.path.isfile(absolute):
            raise InvalidJobError(f"train={path!r}: there is no such script (looked at {absolute})")
        return absolute
    return _resolve(train) if isinstance(train, str) else train


def is_module_reference(text: str) -> bool:
    """True for ``"package.module:function"``, False for the path of a script."""
    return ":" in text and os.sep not in text and not text.endswith(".py")


def _resolve(reference: str) -> object:
    module_name, _, attribute = reference.partition(":")
    try:
        found: object = importlib.import_module(module_name)
    except Exception as error:
        raise InvalidJobError(f"train={reference!r}: module {module_name!r} cannot be imported: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise InvalidJobError(f"train={reference!r}: module {module_name!r} has no function {attribute!r}")
        found = getattr(found, part)
    return found


def _check_callable(function: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not callable(function):
        raise InvalidJobError(
            f"train is {function!r}; give a function, 'path/to/script.py' or 'package.module:function'"
        )
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        kind = "an async" if inspect.iscoroutinefunction(function) else "a generator"
        raise InvalidJobError(f"train={_name_of(function)} is {kind} function; ranks call plain functions")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InvalidJobError(f"the arguments do not fit {_name_of(function)}{signature}: {error}") from None


def _name_of(function: object) -> str:
    inner = getattr(function, "func", function)
    name = getattr(inner, "__name__", type(inner).__name__)
    return "lambda" if name == "<lambda>" else str(name)


def _build_script(
    absolute: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    refs: list[ResultRef],
    extra: dict[str, bytes],
    needed: set[str],
) -> Payload:
    if kwargs:
        raise InvalidJobError(
            f"a script takes positional arguments only, not {', '.join(sorted(kwargs))}: "
            f"write '--{next(iter(kwargs))}', value"
        )
    with open(absolute, "rb") as file:
        source = file.read()
    try:
        tree = parse(source, absolute)
    except (SyntaxError, ValueError) as error:
        raise InvalidJobError(f"train={absolute!r} is not Python: {error}") from None
    shipped = tuple(value if isinstance(value, ResultRef) else str(value) for value in args)
    parts = {"kind": "script", "path": absolute, "source": source, "args": shipped, **extra}
    data = pack(pickle.dumps(parts, protocol=pickle.HIGHEST_PROTOCOL), [])
    with search_path(os.path.dirname(absolute)):
        modules = zip_modules(imports_of_tree(tree) | needed)
    return Payload(os.path.basename(absolute), data, modules, refs)


def _pickle(
    parts: dict[str, Any], find_culprit: Callable[[], str], needed: set[str]
) -> tuple[list[Part], Shipped | None]:
    buffer = io.BytesIO()
    buffers: list[memoryview] = []
    pickler = TrainingPickler(buffer, beside(buffers))
    try:
        pickler.dump(parts)
    except Exception as error:
        raise InvalidJobError(f"{find_culprit()} cannot be pickled: {error}") from error
    return pack(buffer.getvalue(), buffers), zip_modules(pickler.needed | needed)


def _find_culprit(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Names the argument, or the function, that pickling fails on."""
    names = [f"#{position}" for position in range(1, len(args) + 1)]
    with contextlib.suppress(TypeError, ValueError):
        bound = inspect.signature(function).bind(*args, **kwargs)
        known = [name for name in bound.arguments if name not in kwargs]
        names[: len(known)] = known[: len(names)]
    candidates = [*zip(names, args, strict=True), *kwargs.items()]
    for name, value in candidates:
        try:
            TrainingPickler(io.BytesIO()).dump(value)
        except Exception:
            return f"argument {name!r} (a {type(value).__name__})"
    return f"train={_name_of(function)}, or something it refers to,"


class TrainingPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Notes the user modules that must be importable where the pickle is loaded; others go by value."""

    def __init__(self, file: io.BytesIO, on_buffer: Callable[[pickle.PickleBuffer], bool] | None = None) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=on_buffer)
        self.needed: set[str] = set()
        self._by_value: list[Any] = []
        self._tensors = Tensors()
        self.travels = functools.cache(self._decide)

    def dump(self, obj: object) -> None:
        """Pickles an object, one at a time in this process."""
        self._tensors = Tensors(obj)
        with _REGISTRY_LOCK:
            try:
                super().dump(obj)
            finally:
                for module in self._by_value:
                    cloudpickle.unregister_pickle_by_value(module)
                self._by_value.clear()

    def _decide(self, name: str) -> bool:
        """True for a module that travels as source; by value goes the user's other code, as pickle comes to it."""
        if travels_as_source(name):
            return True
        # By value goes what is below a module that does, too.
        for part in itertools.accumulate(name.split("."), "{}.{}".format):
            self._register(sys.modules.get(part))
        return False

    def _register(self, module: object) -> None:
        if not (isinstance(module, types.ModuleType) and is_user_module(module)):
            return
        # A module may be known under another name as well.
        name = module.__name__
        is_known = name in cloudpickle.list_registry_pickle_by_value()
        if sys.modules.get(name) is module and not is_known and not travels_as_source(name):
            cloudpickle.register_pickle_by_value(module)
            self._by_value.append(module)

    def reducer_override(self, obj: Any) -> Any:
        """As cloudpickle; notes the modules that the object needs."""
        if reduced := self._tensors.reduce(obj):
            return reduced
        if isinstance(obj, types.ModuleType) and self.travels(obj.__name__):
            self.needed.add(obj.__name__)
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, types.FunctionType):
            self.needed |= imports_of_code(obj.__code__, obj.__globals__.get("__package__"))
        module = getattr(obj, "__module__", None)
        if module is None and isinstance(obj, (type, types.FunctionType)):
            module = cloudpickle.cloudpickle._whichmodule(obj, obj.__qualname__)
        if isinstance(module, str) and self.travels(module) and _is_global(obj, module):
            self.needed.add(module)
        return super().reducer_override(obj)


def _is_global(obj: Any, module: str) -> bool:
    """True if pickle can find the object by its name, so that its module is needed."""
    found: Any = sys.modules.get(module)
    for part in str(getattr(obj, "__qualname__", "")).split("."):
        found = getattr(found, part, None)
    return found is obj


@contextlib.contextmanager
def search_path(directory: str) -> Iterator[None]:
    """In the block, modules beside a script are found first, as Python itself does."""
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(directory)
