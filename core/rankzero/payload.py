"""Function or script and arguments to bytes, with the user's modules they need.

The user's own modules (everything that is not installed) need not exist where the ranks run:

* a module that can be imported by its name travels as source in ``modules.zip``, with the modules
  it imports in turn; its functions and classes are pickled by reference, so that each exists once;
* ``__main__``, notebooks, DAG files under made-up names, and modules that import an orchestrator,
  which executors do not have, are pickled by value, as far as the function refers to them.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import importlib
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
_ORCHESTRATORS = frozenset({"airflow", "dagster", "airflow_rankzero", "dagster_rankzero"})
# Found beside the user's modules in some layouts ($SPARK_HOME/python), and never the user's.
_NEVER_SHIPPED = _OUR_PACKAGES | {"pyspark", "py4j", "torch", "numpy", "cloudpickle", "__main__"}
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
    parts = {"kind": "function", "name": _name_of(function), "function": function, "args": args, "kwargs": kwargs}
    data, modules = _pickle(parts, lambda: _find_culprit(function, args, kwargs))
    return Payload(_name_of(function), data, modules, refs)


def _is_module_reference(text: str) -> bool:
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
    """Notes the user modules that must be importable where the pickle is loaded."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.needed: set[str] = set()
        self._travels = functools.cache(_travels_as_source)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.ModuleType) and self._travels(obj.__name__):
            self.needed.add(obj.__name__)
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, types.FunctionType):
            self.needed |= _imports_of_code(obj.__code__, obj.__globals__.get("__package__"))
        module = getattr(obj, "__module__", None)
        if isinstance(module, str) and _is_global(obj, module) and self._travels(module):
            self.needed.add(module)
        return super().reducer_override(obj)


def _is_global(obj: Any, module: str) -> bool:
    """True if pickle can find the object by its name, so that its module is needed."""
    found: Any = sys.modules.get(module)
    for part in str(getattr(obj, "__qualname__", "")).split("."):
        found = getattr(found, part, None)
    return found is obj


@contextlib.contextmanager
def _user_modules_by_value() -> Iterator[None]:
    """By value go the user's modules that cannot be imported where the ranks run."""
    with _REGISTRY_LOCK:
        before = cloudpickle.list_registry_pickle_by_value()
        added = [
            module
            for name, module in list(sys.modules.items())
            if isinstance(module, types.ModuleType)
            and name == getattr(module, "__name__", None)
            and name not in before
            and _is_user_module(module)
            and not _travels_as_source(name)
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


@functools.lru_cache(maxsize=1024)
def _is_install_target(directory: str) -> bool:
    """True for a folder that a package installer filled (``pip install --target``)."""
    with contextlib.suppress(OSError):
        return any(name.endswith(".dist-info") for name in os.listdir(directory or "."))
    return False


def _is_user_module(module: types.ModuleType) -> bool:
    root = module.__name__.partition(".")[0]
    if root in _NEVER_SHIPPED or root in sys.stdlib_module_names:
        return False
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and _is_user_file(file)


def _spec_of(root: str) -> Any:
    """The spec of a top-level user module that can be found by name, else None."""
    if root in _NEVER_SHIPPED or root in sys.stdlib_module_names:
        return None
    # Not importlib.util.find_spec: that trusts sys.modules, where a DAG file may sit under a name
    # that nobody else can import.
    spec = None
    for finder in sys.meta_path:
        with contextlib.suppress(ImportError, ValueError, AttributeError):
            spec = spec or finder.find_spec(root, None)
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or []) or [spec.origin or ""]
    if not all(place and _is_user_file(place) for place in places):
        return None
    return None if _is_install_target(os.path.dirname(places[0])) else spec


def _travels_as_source(name: str) -> bool:
    """True for a user module that is found by name and imports without an orchestrator."""
    spec = _spec_of(name.partition(".")[0])
    return spec is not None and not _needs_orchestrator(name, frozenset())


def _needs_orchestrator(name: str, visiting: frozenset[str]) -> bool:
    """True if importing a user module imports Airflow or Dagster, itself or through another one."""
    root = name.partition(".")[0]
    if root in _ORCHESTRATORS:
        return True
    if name in visiting or _spec_of(root) is None:
        return False
    parents = [name[: position + 1] for position in range(len(name)) if name[position + 1 : position + 2] == "."]
    return any(
        _needs_orchestrator(imported, visiting | {name})
        for part in [*parents, name]
        for imported in _imports_of_module(part) - {name}
    )


def _imports_of_module(name: str) -> set[str]:
    """Absolute names that a loaded user module imports at its top level, when it is imported."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py"):
        return set()
    with contextlib.suppress(OSError):
        is_package = os.path.basename(file) == "__init__.py"
        return _top_level_imports(file, os.stat(file).st_mtime, name if is_package else name.rpartition(".")[0])
    return set()


@functools.lru_cache(maxsize=4096)
def _top_level_imports(file: str, _modified: float, package: str) -> set[str]:
    found: set[str] = set()
    try:
        with open(file, "rb") as source:
            waiting: list[ast.AST] = [ast.parse(source.read())]
    except (SyntaxError, ValueError, OSError):
        return found
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            module = ".".join(filter(None, [base if node.level else "", node.module or ""]))
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and not _is_type_checking(node):
            waiting += ast.iter_child_nodes(node)
    return found


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _imports_of_code(code: types.CodeType, package: str | None) -> set[str]:
    """Absolute names that code and the functions nested in it import when they run."""
    found: set[str] = set()
    level = 0
    previous: object = None
    for instruction in dis.get_instructions(code):
        # The compiler pushes the level (0 for absolute imports), then the names, then imports.
        if instruction.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
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
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1, strict_timestamps=False) as archive:
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
                if os.path.isfile(path):
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
