"""Decides which modules are the user's, finds their sources, and decides which can be shipped as source.

A module is the user's if no package installer put it where it is. It is shipped as source if it can
be found by its name and imported without an orchestrator, which executors do not have. Checksums of
sources are computed without importing them.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import itertools
import os
import site
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from typing import Any

from rankzero import store
from rankzero.submit.imports import imports_of_tree, names_of_import, parse

_OUR_PACKAGES = frozenset({"rankzero", "airflow_rankzero", "dagster_rankzero"})
_ORCHESTRATORS = frozenset({"airflow", "dagster", "airflow_rankzero", "dagster_rankzero"})
# Found beside the user's modules in some layouts ($SPARK_HOME/python), and never the user's.
_NEVER_SHIPPED = _OUR_PACKAGES | {"pyspark", "py4j", "torch", "numpy", "cloudpickle", "__main__"}


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
    """Returns True for a folder that a package installer filled (``pip install --target``)."""
    with contextlib.suppress(OSError):
        return any(name.endswith(".dist-info") for name in os.listdir(directory or "."))
    return False


def is_user_module(module: types.ModuleType) -> bool:
    """Returns True for a loaded module of the user: one that no package installer put where it is."""
    root = module.__name__.partition(".")[0]
    if root in _NEVER_SHIPPED or root in sys.stdlib_module_names:
        return False
    file = getattr(module, "__file__", None)
    return is_made_by_hand(root) if file is None else isinstance(file, str) and _is_user_file(file)


def is_made_by_hand(name: str) -> bool:
    """Returns True for a loaded top-level module without a file, which user code has put into ``sys.modules``."""
    module = sys.modules.get(name)
    if not isinstance(module, types.ModuleType) or name in _NEVER_SHIPPED or name in sys.stdlib_module_names:
        return False
    return not any(getattr(module, fact, None) for fact in ("__spec__", "__file__", "__path__", "__loader__"))


def is_user_module_name(name: str) -> bool:
    """Returns True for the name of a loaded module of the user."""
    module = sys.modules.get(name)
    return isinstance(module, types.ModuleType) and is_user_module(module)


def stable_name(name: str) -> str:
    """Returns a loaded module's name, or that of its file if no module can be found by it, as for a DAG file."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if not isinstance(file, str) or spec_of(name.partition(".")[0]):
        return name
    return os.path.splitext(os.path.basename(file))[0]


def spec_of(name: str, first: str | None = None) -> Any:
    """Returns the spec of a user module that can be found by its name, else None. Imports nothing.

    Args:
        name: Absolute name of the module.
        first: A directory that is searched before `sys.path`, such as that of a script. `sys.path` itself is not
            changed, since other threads import meanwhile.
    """
    root, *rest = name.split(".")
    if root in _NEVER_SHIPPED or root in sys.stdlib_module_names:
        return None
    spec = _find(root, None if first is None else (first, *sys.path))
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or []) or [spec.origin or ""]
    if not all(place and _is_user_file(place) for place in places) or _is_install_target(os.path.dirname(places[0])):
        return None
    for part in rest:
        if not spec or not spec.submodule_search_locations:
            return None
        # An editable install may have put a module elsewhere than its parent.
        spec = _find(f"{spec.name}.{part}", tuple(spec.submodule_search_locations))
    return spec


@functools.lru_cache(maxsize=4096)
def _find(name: str, places: tuple[str, ...] | None) -> Any:
    # Not importlib.util.find_spec: it trusts sys.modules, where a DAG file may have a name
    # that executors cannot import; and it imports parents. Without these, a namespace package raises KeyError here.
    spec = None
    for finder in sys.meta_path:
        with contextlib.suppress(ImportError, ValueError, AttributeError, KeyError):
            spec = spec or finder.find_spec(name, places and [*places])
    return spec


forget_places = _find.cache_clear
"""Makes the next searches find modules where they are now; called before each submission and each pickle."""


def source_of(name: str, first: str | None = None) -> str | None:
    """Returns the source file of a user module, ``__init__.py`` of a package; None for anything else.

    Imports nothing.

    Args:
        name: Absolute name of the module.
        first: As for `spec_of`.
    """
    root, *rest = name.split(".")
    spec = spec_of(root, first)
    if spec is None:
        return None
    for base in spec.submodule_search_locations or []:
        place = os.path.join(base, *rest)
        for path in (os.path.join(place, "__init__.py"), f"{place}.py"):
            if os.path.isfile(path):
                return path
    origin = getattr(spec_of(name, first), "origin", None)
    return origin if isinstance(origin, str) and origin.endswith(".py") and os.path.isfile(origin) else None


def travels_as_source(name: str) -> bool:
    """Returns True for a user module that can be found by its name and imported without an orchestrator."""
    return spec_of(name.partition(".")[0]) is not None and not _needs_orchestrator(name)


def _needs_orchestrator(name: str) -> bool:
    """Returns True if importing a user module imports Airflow or Dagster, directly or through another user module."""
    waiting, seen = {name}, set()
    while waiting:
        name = waiting.pop()
        root = name.partition(".")[0]
        if root in _ORCHESTRATORS:
            return True
        # Importing a.b.c imports a and a.b first.
        for part in itertools.accumulate(name.split("."), "{}.{}".format) if spec_of(root) else ():
            if part not in seen:
                seen.add(part)
                waiting |= _imports_of_module(part)
        waiting -= seen
    return False


def _imports_of_module(name: str) -> set[str]:
    """Returns the absolute names that a loaded user module imports at its top level."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py"):
        return set()
    with contextlib.suppress(OSError):
        is_package = os.path.basename(file) == "__init__.py"
        return _top_level_imports(file, store.fingerprint(file), name if is_package else name.rpartition(".")[0])
    return set()


@functools.lru_cache(maxsize=4096)
def _top_level_imports(file: str, _fingerprint: str, package: str) -> set[str]:
    found: set[str] = set()
    try:
        with open(file, "rb") as source:
            waiting: list[ast.AST] = [parse(source.read())]
    except (SyntaxError, ValueError, OSError):
        return found
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
            found |= names_of_import(package, node.level, node.module or "", names)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and not _is_type_checking(node):
            waiting += ast.iter_child_nodes(node)
    return found


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def digests_of_modules(names: Iterable[str], first: str | None = None) -> dict[str, str]:
    """Returns checksums, by syntax, of the user modules among ``names`` and of those that they import in turn.

    Args:
        names: Absolute names; those that are no user modules are ignored.
        first: A directory that is searched before `sys.path`, such as that of a script.
    """
    waiting = set(names)
    seen: set[str] = set()
    digests: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        if name.endswith(".*"):
            waiting |= set(_below(name[:-2], first)) - seen
        # Importing a.b.c imports a and a.b first.
        for part in itertools.accumulate(name.split("."), "{}.{}".format):
            if part in seen:
                continue
            seen.add(part)
            if path := source_of(part, first):
                with contextlib.suppress(OSError):
                    is_package = os.path.basename(path) == "__init__.py"
                    package = part if is_package else part.rpartition(".")[0]
                    digests[part], imported = _read(path, store.fingerprint(path), package)
                    waiting |= imported - seen
    return digests


def digest_of_script(path: str) -> tuple[str, frozenset[str]]:
    """Returns a checksum of a script by its syntax, and the absolute names that it imports. Raises OSError."""
    return _read(path, store.fingerprint(path), "")


def _below(package: str, first: str | None) -> Iterator[str]:
    """Yields the names of all modules in the folders of a user's package."""
    for base in getattr(spec_of(package, first), "submodule_search_locations", None) or []:
        for directory, children, names in os.walk(base):
            children[:] = filter(str.isidentifier, children)
            parts = os.path.relpath(directory, base).split(os.sep)
            parent = ".".join([package, *(part for part in parts if part != os.curdir)])
            yield from (f"{parent}.{name[:-3]}" for name in names if name.endswith(".py") and name != "__init__.py")


@functools.lru_cache(maxsize=4096)
def _read(path: str, _fingerprint: str, package: str) -> tuple[str, frozenset[str]]:
    with open(path, "rb") as file:
        source = file.read()
    try:
        tree = parse(source, path)
    except (SyntaxError, ValueError):
        return hashlib.sha256(source).hexdigest(), frozenset()
    # Without line numbers, so that comments and layout do not count.
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), frozenset(imports_of_tree(tree, source, package))
