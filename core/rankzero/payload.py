"""Function or script and arguments to bytes, with the user's modules they need.

Functions and classes of the user's own modules (everything that is not installed) are pickled by
value, so a function of ``__main__``, of a notebook, of a DAG file or of a package that lies beside
it runs where none of these exist. Modules that the code imports when it runs, or uses as modules,
travel as source in ``modules.zip``.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import importlib
import importlib.machinery
import inspect
import io
import os
import pickle
import site
import sys
import sysconfig
import threading
import types
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from rankzero.errors import InvalidJobError
from rankzero.result import ResultRef, map_refs

MODULES_LIMIT = 64 << 20
"""Bytes of user modules that travel with a job."""

_OUR_PACKAGES = frozenset({"rankzero", "airflow_rankzero", "dagster_rankzero"})
_SKIPPED_DIRECTORIES = frozenset({"__pycache__", ".git", ".venv", "node_modules"})
# cloudpickle's registry of by-value modules is global to the process.
_REGISTRY_LOCK = threading.Lock()


@dataclass(frozen=True)
class Payload:
    """What the workers get.

    Attributes:
        name: Of the function or script, for people.
        data: The pickle of function or script and arguments.
        modules: A zip of user modules, or None.
        refs: The `ResultRef` objects among the arguments.
    """

    name: str
    data: bytes
    modules: bytes | None = None
    refs: list[ResultRef] = field(default_factory=list)


def build(train: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Payload:
    """Makes the payload.

    Args:
        train: A callable, ``"path/to/script.py"``, a path object, or ``"package.module:function"``.
        args: Positional arguments. `ResultRef` in them, also nested, are opened in the workers.
        kwargs: Keyword arguments; a script takes none.

    Raises:
        InvalidJobError: ``train`` is none of these, the arguments do not fit its signature,
            or something cannot be pickled; the message names it.
    """
    refs: list[ResultRef] = []
    map_refs([list(args), dict(kwargs)], refs.append)
    if isinstance(train, os.PathLike) or (isinstance(train, str) and not _is_module_reference(train)):
        return _build_script(os.fspath(train), args, kwargs, refs)
    function = _resolve(train) if isinstance(train, str) else train
    _check_callable(function, args, kwargs)
    assert callable(function)
    parts = {"kind": "function", "function": function, "args": args, "kwargs": kwargs}
    data, modules = _pickle(parts, lambda: _find_culprit(function, args, kwargs))
    return Payload(_name_of(function), data, modules, refs)


def _is_module_reference(text: str) -> bool:
    return ":" in text and os.sep not in text and not text.endswith(".py")


def _resolve(reference: str) -> object:
    module_name, _, attribute = reference.partition(":")
    try:
        found: object = importlib.import_module(module_name)
    except ImportError as error:
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
    if inspect.iscoroutinefunction(function):
        raise InvalidJobError(f"train={_name_of(function)} is an async function; ranks call plain functions")
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


def _build_script(path: str, args: tuple[Any, ...], kwargs: dict[str, Any], refs: list[ResultRef]) -> Payload:
    if kwargs:
        raise InvalidJobError(
            f"a script takes positional arguments only, not {', '.join(sorted(kwargs))}: "
            f"write '--{next(iter(kwargs))}', value"
        )
    absolute = os.path.abspath(os.path.expanduser(path))
    if os.path.isdir(absolute):
        raise InvalidJobError(f"train={path!r} is a directory; give the script in it")
    if not os.path.isfile(absolute):
        raise InvalidJobError(f"train={path!r}: there is no such script (looked at {absolute})")
    with open(absolute, "rb") as file:
        source = file.read()
    try:
        tree = ast.parse(source, absolute)
    except (SyntaxError, ValueError) as error:
        raise InvalidJobError(f"train={path!r} is not Python: {error}") from None
    shipped = tuple(value if isinstance(value, ResultRef) else str(value) for value in args)
    parts = {"kind": "script", "path": absolute, "source": source, "args": shipped}
    data = pickle.dumps(parts, protocol=pickle.HIGHEST_PROTOCOL)
    with _search_path(os.path.dirname(absolute)):
        modules = _zip_modules(_imports_of_tree(tree))
    return Payload(os.path.basename(path), data, modules, refs)


def _pickle(parts: dict[str, Any], find_culprit: Callable[[], str]) -> tuple[bytes, bytes | None]:
    buffer = io.BytesIO()
    with _user_modules_by_value():
        pickler = _Pickler(buffer)
        try:
            pickler.dump(parts)
        except Exception as error:
            raise InvalidJobError(f"{find_culprit()} cannot be pickled: {error}") from error
    return buffer.getvalue(), _zip_modules(pickler.needed)


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
            _Pickler(io.BytesIO()).dump(value)
        except Exception:
            return f"argument {name!r} (a {type(value).__name__})"
    return f"train={_name_of(function)}, or something it refers to,"


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Notes the user modules that the pickled code will need as modules."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.needed: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.ModuleType) and _is_importable_user_module(obj):
            self.needed.add(obj.__name__)
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, types.FunctionType):
            self.needed |= _imports_of_code(obj.__code__, obj.__globals__.get("__package__"))
        return super().reducer_override(obj)


@contextlib.contextmanager
def _user_modules_by_value() -> Iterator[None]:
    with _REGISTRY_LOCK:
        before = cloudpickle.list_registry_pickle_by_value()
        added = [
            module
            for name, module in list(sys.modules.items())
            if isinstance(module, types.ModuleType)
            and name == getattr(module, "__name__", None)
            and name not in before
            and _is_user_module(module)
        ]
        for module in added:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in added:
                cloudpickle.unregister_pickle_by_value(module)


def _installed_roots() -> tuple[str, ...]:
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths.update(site.getsitepackages())
    paths.add(site.getusersitepackages())
    return tuple(os.path.realpath(path) + os.sep for path in paths if path)


_INSTALLED_ROOTS = _installed_roots()


@functools.lru_cache(maxsize=16384)
def _is_user_file(path: str) -> bool:
    if path.startswith(_INSTALLED_ROOTS):
        return False
    real = os.path.realpath(path)
    parts = real.split(os.sep)
    if "site-packages" in parts or "dist-packages" in parts or ".zip" in real:
        return False
    return not real.startswith(_INSTALLED_ROOTS)


def _is_user_module(module: types.ModuleType) -> bool:
    root = module.__name__.partition(".")[0]
    if root in _OUR_PACKAGES or root in sys.stdlib_module_names or root == "__main__":
        return False
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and _is_user_file(file)


def _is_importable_user_module(module: types.ModuleType) -> bool:
    return _is_user_module(module) and _spec_of(module.__name__.partition(".")[0]) is not None


def _spec_of(root: str) -> Any:
    """The spec of a top-level user module that can be found by name, else None."""
    if root in _OUR_PACKAGES or root in sys.stdlib_module_names or root == "__main__":
        return None
    try:
        # Not find_spec of importlib.util: that trusts sys.modules, where a DAG file may sit
        # under a name that nobody else can import.
        spec = importlib.machinery.PathFinder.find_spec(root)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or []) or [spec.origin or ""]
    return spec if all(place and _is_user_file(place) for place in places) else None


def _imports_of_code(code: types.CodeType, package: str | None) -> set[str]:
    """Absolute names that code and the functions nested in it import when they run."""
    found: set[str] = set()
    level = 0
    previous: object = None
    for instruction in dis.get_instructions(code):
        # The compiler pushes the level (0 for absolute imports), then the names, then imports.
        if instruction.opname == "LOAD_CONST":
            level, previous = previous if isinstance(previous, int) else 0, instruction.argval
        elif instruction.opname == "IMPORT_NAME":
            found.add((package or "") if level else instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _imports_of_code(constant, package)
    return found - {""}


def _imports_of_tree(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


def _zip_modules(names: Iterable[str]) -> bytes | None:
    """The user modules among ``names``, and those that they import in turn, as a zip of sources."""
    waiting = {name.partition(".")[0] for name in names}
    seen: set[str] = set()
    files: dict[str, str] = {}
    while waiting - seen:
        root = (waiting - seen).pop()
        seen.add(root)
        spec = _spec_of(root)
        if spec is None:
            continue
        for archive_name, path in _files_of(root, spec):
            files[archive_name] = path
            if path.endswith(".py"):
                with contextlib.suppress(SyntaxError, ValueError, OSError), open(path, "rb") as source:
                    waiting |= {name.partition(".")[0] for name in _imports_of_tree(ast.parse(source.read()))}
    if not files:
        return None
    total = sum(os.path.getsize(path) for path in files.values())
    if total > MODULES_LIMIT:
        raise InvalidJobError(
            f"the user modules {', '.join(sorted(seen))} hold {total >> 20} MiB, over the limit of "
            f"{MODULES_LIMIT >> 20} MiB that travel with a job: install them on the executors instead"
        )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for archive_name, path in sorted(files.items()):
            archive.write(path, archive_name)
    return buffer.getvalue()


def _files_of(root: str, spec: Any) -> Iterator[tuple[str, str]]:
    if not spec.submodule_search_locations:
        yield os.path.basename(spec.origin), spec.origin
        return
    for base in spec.submodule_search_locations:
        for directory, children, names in os.walk(base):
            children[:] = [name for name in children if name not in _SKIPPED_DIRECTORIES]
            # A folder without __init__.py may be anything that happens to have the name.
            for name in names if spec.origin else [name for name in names if name.endswith(".py")]:
                path = os.path.join(directory, name)
                yield os.path.join(root, os.path.relpath(path, base)), path


@contextlib.contextmanager
def _search_path(directory: str) -> Iterator[None]:
    """Modules beside a script are found first, as Python itself does."""
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(directory)
