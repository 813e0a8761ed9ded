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


def spec_of(root: str, first: str | None = None) -> Any:
    """Returns the spec of a user's top-level module that can be found by its name, else None. Imports nothing.

    A directory may be searched before `sys.path`, which is not changed, since other threads import meanwhile.
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
    waiting, seen = {name}, set[str]()
    while waiting:
        # Importing a.b.c imports a and a.b first.
        for part in {*parents_of(waiting.pop())} - seen:
            seen.add(part)
            if part in ORCHESTRATORS:
                return True
            file = getattr(sys.modules.get(part), "__file__", None)
            if isinstance(file, str) and file.endswith(".py") and spec_of(part.partition(".")[0]):
                with contextlib.suppress(OSError):
                    waiting |= source_of_file(file, package_of(part, file)).early - seen
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
    files = (getattr(sys.modules.get(part), "__file__", None) for part in parents_of(module))
    is_user_s = any(isinstance(file, str) and _is_user_file(file) for file in files)
    return is_user_s and module.partition(".")[0] not in NEVER_SHIPPED and not travels(module)


def is_sent_by_name(value: Any) -> bool:
    """Returns True for a function or class that ranks import by its name; any other is sent by value."""
    module, name = getattr(value, "__module__", None), value.__qualname__
    if not isinstance(module, str) or module in ("__main__", "__mp_main__") or "<locals>" in name:
        # A function that `exec` made in a namespace without a name has no module.
        return False
    if isinstance(value, type) and value.__flags__ & (_HEAP_TYPE | _IMMUTABLE_TYPE) != _HEAP_TYPE:
        # No `class` statement has made it: a class of the interpreter or an installed package, whatever its name.
        return True
    # An installed package may also have made a class for the user, which cannot be imported from the package.
    return named_like(value, module) is value and not is_sent_by_value(module)


_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8
"""``Py_TPFLAGS_HEAPTYPE`` and ``Py_TPFLAGS_IMMUTABLETYPE`` of CPython."""


def is_distributed(value: Any) -> bool:
    """Returns True for what `rankzero.distributed` has made of a function."""
    return hasattr(type(value), "launch_function")


def is_importable(value: Any) -> bool:
    """Returns True for an object that ranks can import from the user module that has defined it."""
    module = getattr(value, "__module__", None)
    return isinstance(module, str) and travels(module) and named_like(value, module) is value


def named_like(value: Any, module: str) -> Any:
    """Returns the object that a module has under the name of ``value``, or None."""
    found: Any = sys.modules.get(module)
    for part in str(getattr(value, "__qualname__", "")).split("."):
        found = getattr(found, part, None)
    return found


_CACHED: Any = functools._lru_cache_wrapper


def reduce_wrapper(obj: Any) -> tuple[Any, ...] | None:
    """Reduces an object around a function that pickle cannot reduce, or would with what ranks must not get."""
    if is_distributed(obj) and not is_importable(obj):
        for_ranks: tuple[Any, ...] = obj.in_ranks()
        return for_ranks
    if isinstance(obj, functools.cached_property):
        # Before Python 3.12 it holds a lock.
        return functools.cached_property, (obj.func,), {"attrname": obj.attrname}
    if isinstance(obj, _CACHED) and not is_sent_by_name(obj):
        # To the function that it wraps, with an empty cache.
        chosen = obj.cache_parameters()
        return _CACHED, (obj.__wrapped__, chosen["maxsize"], chosen["typed"], functools._CacheInfo), dict(vars(obj))
    return None
