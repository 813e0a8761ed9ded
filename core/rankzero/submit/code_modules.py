"""Decides which modules are the user's, finds their sources, and decides what is sent by value and what by name.

A module is the user's if no package installer put it where it is. It is sent as files if it can be found by its name
and imported without an orchestrator, which executors do not have. All else of the user is sent by value: ``__main__``,
notebooks, DAG files under synthetic names, and modules that import an orchestrator. Nothing is imported to decide this.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import itertools
import os
import site
import sys
import sysconfig
import types
from collections.abc import Iterable
from typing import Any

from rankzero.submit.code_source import source_of_file

ORCHESTRATORS = frozenset({"airflow", "dagster", "airflow_rankzero", "dagster_rankzero"})
# Found beside the user's modules in some layouts ($SPARK_HOME/python), and never the user's. The search for pip alone
# makes setuptools fail to import in this process.
_BESIDE = frozenset({"rankzero", "pip", "pyspark", "py4j", "torch", "numpy", "cloudpickle", "__main__", "__mp_main__"})
NEVER_SHIPPED = _BESIDE | ORCHESTRATORS | sys.stdlib_module_names


_PLACES = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_PLACES |= {*site.getsitepackages(), site.getusersitepackages()}
_INSTALLED_ROOTS = tuple(os.path.realpath(path) + os.sep for path in _PLACES if path)


@functools.lru_cache(maxsize=16384)
def _is_user_file(path: str) -> bool:
    real = os.path.realpath(path)
    is_installed = path.startswith(_INSTALLED_ROOTS) or real.startswith(_INSTALLED_ROOTS) or ".zip" in real
    return not (is_installed or {"site-packages", "dist-packages"} & {*real.split(os.sep)})


@functools.lru_cache(maxsize=1024)
def _is_install_target(directory: str) -> bool:
    """Returns True for a folder that a package installer filled (``pip install --target``)."""
    return bool(glob.glob(os.path.join(glob.escape(directory or "."), "*.dist-info")))


def is_user_module(name: str) -> bool:
    """Returns True for the name of a loaded module of the user: one that no package installer put where it is.

    A module that user code has made and put into ``sys.modules`` has no file, and none of the facts of an import.
    """
    root, module = name.partition(".")[0], sys.modules.get(name)
    if not isinstance(module, types.ModuleType) or root in NEVER_SHIPPED:
        return False
    if isinstance(file := getattr(module, "__file__", None), str):
        return _is_user_file(file)
    made = sys.modules.get(root)
    return not any(getattr(made, fact, None) for fact in ("__spec__", "__file__", "__path__", "__loader__"))


def spec_of(root: str, first: str | None = None) -> Any:
    """Returns the spec of a user's top-level module that can be found by its name, else None. Imports nothing.

    Args:
        root: Name of the module.
        first: A directory that is searched before `sys.path`, such as that of a script. `sys.path` itself is not
            changed, since other threads import meanwhile.
    """
    spec = None if root in NEVER_SHIPPED else _find(root, None if first is None else (first, *sys.path))
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or []) or [spec.origin or ""]
    is_user_s = all(place and _is_user_file(place) for place in places)
    return spec if is_user_s and not _is_install_target(os.path.dirname(places[0])) else None


@functools.lru_cache(maxsize=4096)
def _find(name: str, places: tuple[str, ...] | None) -> Any:
    # Not importlib.util.find_spec: it trusts sys.modules, where a DAG file may have a name
    # that executors cannot import; and it imports parents. Without these, a namespace package raises KeyError here.
    spec = None
    for finder in sys.meta_path:
        with contextlib.suppress(ImportError, ValueError, AttributeError, KeyError):
            spec = spec or finder.find_spec(name, places and [*places])
    return spec


@functools.lru_cache(maxsize=64)
def top_level_names(first: str | None = None) -> frozenset[str]:
    """Returns every name that may be a top-level module's, since `spec_of` takes too long to ask for any text."""
    names = set(sys.modules)
    for place in {first or "", *sys.path}:
        with contextlib.suppress(OSError):
            names.update(name.partition(".")[0] for name in os.listdir(place or "."))
    return frozenset(names)


@functools.lru_cache(maxsize=4096)
def travels(name: str) -> bool:
    """Returns True for a user module that can be found by its name and imported without an orchestrator."""
    return spec_of(name.partition(".")[0]) is not None and not _needs_orchestrator(name)


def forget_places() -> None:
    """Makes the next searches find modules where they are now; called before each submission and each pickle."""
    _find.cache_clear()
    travels.cache_clear()
    top_level_names.cache_clear()


def _needs_orchestrator(name: str) -> bool:
    """Returns True if importing a user module imports Airflow or Dagster, directly or through another user module."""
    waiting, seen = {name}, set()
    while waiting:
        name = waiting.pop()
        root = name.partition(".")[0]
        if root in ORCHESTRATORS:
            return True
        # Importing a.b.c imports a and a.b first.
        for part in parents_of(name) if spec_of(root) else ():
            file = getattr(sys.modules.get(part), "__file__", None)
            if part not in seen and isinstance(file, str) and file.endswith(".py"):
                with contextlib.suppress(OSError):
                    waiting |= source_of_file(file, package_of(part, file)).early
            seen.add(part)
        waiting -= seen
    return False


def parents_of(name: str) -> Iterable[str]:
    """Returns the names ``a``, ``a.b`` and ``a.b.c`` of a module ``a.b.c``, which Python imports in this order."""
    return itertools.accumulate(name.split("."), "{}.{}".format)


def package_of(name: str, path: str) -> str:
    """Returns the package at which relative imports of a module begin."""
    return name if os.path.basename(path) == "__init__.py" else name.rpartition(".")[0]


# -- by value or by name -----------------------------------------------------------------------


def is_sent_by_value(module: str) -> bool:
    """Returns True for a loaded module of the user, or one below such a module, that does not travel as files."""
    return not travels(module) and any(map(is_user_module, parents_of(module)))


def is_sent_by_name(value: Any) -> bool:
    """Returns True for a function or class that ranks import by its name; any other is sent by value."""
    module, name = getattr(value, "__module__", None), value.__qualname__
    if not isinstance(module, str) or module in ("__main__", "__mp_main__") or "<locals>" in name:
        # A function that `exec` made in a namespace without a name has no module.
        return False
    if isinstance(value, type) and value.__flags__ & (_HEAP_TYPE | _IMMUTABLE_TYPE) != _HEAP_TYPE:
        # No `class` statement has made it: a class of the interpreter or an installed package, whatever its name.
        return True
    if wrapper_of(value):
        # Its name belongs to the wrapper, from which ranks take it.
        return travels(module)
    # An installed package may also have made a class for the user, which cannot be imported from the package.
    return named_like(value, module) is value and not is_sent_by_value(module)


_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8
"""``Py_TPFLAGS_HEAPTYPE`` and ``Py_TPFLAGS_IMMUTABLETYPE`` of CPython."""


def wrapper_of(function: Any) -> Any:
    """Returns what `functools.wraps` or `rankzero.distributed` has put in the place of a module's function, or None."""
    found = named_like(function, function.__module__) if isinstance(function, types.FunctionType) else None
    is_wrapper = isinstance(found, types.FunctionType) or is_distributed(found)
    return found if is_wrapper and getattr(found, "__wrapped__", None) is function else None


def is_distributed(value: Any) -> bool:
    """Returns True for what `rankzero.distributed` has made of a function."""
    return hasattr(type(value), "launch_function")


def named_like(value: Any, module: str) -> Any:
    """Returns the object that a module has under the name of ``value``, or None."""
    found: Any = sys.modules.get(module)
    for part in str(getattr(value, "__qualname__", "")).split("."):
        found = getattr(found, part, None)
    return found
