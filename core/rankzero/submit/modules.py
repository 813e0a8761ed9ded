"""The user's own modules: which they are, which can travel as source, and the zip they travel in.

A module is the user's if no package installer put it where it is. It travels as source if it can
be found by its name and imports without an orchestrator, which executors do not have.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import gc
import io
import itertools
import logging
import os
import re
import site
import sys
import sysconfig
import threading
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rankzero.errors import InvalidJobError

logger = logging.getLogger(__name__)

MODULES_LIMIT = 64 << 20
"""Bytes of user modules that travel with a job."""

_OUR_PACKAGES = frozenset({"rankzero", "airflow_rankzero", "dagster_rankzero"})
_ORCHESTRATORS = frozenset({"airflow", "dagster", "airflow_rankzero", "dagster_rankzero"})
# Found beside the user's modules in some layouts ($SPARK_HOME/python), and never the user's.
_NEVER_SHIPPED = _OUR_PACKAGES | {"pyspark", "py4j", "torch", "numpy", "cloudpickle", "__main__"}
_SKIPPED_DIRECTORIES = frozenset({"__pycache__", "node_modules"})

_SECRETS = re.compile(
    r".*\.(pem|key|p12|pfx|jks|keystore|kdbx|ppk|keytab|env)|id_(rsa|dsa|ecdsa|ed25519).*|credentials.*"
    r"|.*credentials\.json|secrets?\..*|service[-_]account.*\.json|kubeconfig",
    re.IGNORECASE,
)
"""Names of data files that hold keys or passwords. Sources travel whatever they are called: they are imported."""


_PARSING = threading.Lock()


def parse(source: str | bytes, filename: str = "<unknown>") -> ast.Module:
    """Parses without being interrupted: CPython 3.11 and 3.12 have one count of the depth for all who parse.

    Who interrupts is a collection of garbage, whose finalizers may print a traceback, which parses, or let another
    thread go on.
    """
    with _PARSING:
        collects = gc.isenabled()
        gc.disable()
        try:
            return ast.parse(source, filename)
        finally:
            if collects:
                gc.enable()


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


def is_user_module(module: types.ModuleType) -> bool:
    """True for a loaded module that no package installer put where it is."""
    root = module.__name__.partition(".")[0]
    if root in _NEVER_SHIPPED or root in sys.stdlib_module_names:
        return False
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and _is_user_file(file)


def is_user_module_name(name: str) -> bool:
    """The same for the name of a loaded module."""
    module = sys.modules.get(name)
    return isinstance(module, types.ModuleType) and is_user_module(module)


def spec_of(root: str) -> Any:
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


def travels_as_source(name: str) -> bool:
    """True for a user module that is found by name and imports without an orchestrator."""
    spec = spec_of(name.partition(".")[0])
    return spec is not None and not _needs_orchestrator(name, frozenset())


def _needs_orchestrator(name: str, visiting: frozenset[str]) -> bool:
    """True if importing a user module imports Airflow or Dagster, itself or through another one."""
    root = name.partition(".")[0]
    if root in _ORCHESTRATORS:
        return True
    if name in visiting or spec_of(root) is None:
        return False
    # Importing a.b.c imports a and a.b first.
    imported_with_it = itertools.accumulate(name.split("."), "{}.{}".format)
    return any(
        _needs_orchestrator(imported, visiting | {name})
        for part in imported_with_it
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
            waiting: list[ast.AST] = [parse(source.read())]
    except (SyntaxError, ValueError, OSError):
        return found
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
            found |= _names_of_import(package, node.level, node.module or "", names)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and not _is_type_checking(node):
            waiting += ast.iter_child_nodes(node)
    return found


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


@functools.lru_cache(maxsize=1024)
def imports_of_code(code: types.CodeType, package: str | None) -> frozenset[str]:
    """Absolute names that code and the functions nested in it import when they run, and those that may be modules."""
    found: set[str] = set()
    constants: tuple[Any, Any] = (None, None)
    for instruction in dis.get_instructions(code):
        # The compiler pushes the level (0 for absolute imports), then the names, then imports.
        if instruction.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            constants = (constants[1], instruction.argval)
        elif instruction.opname == "IMPORT_NAME":
            level = constants[0] if isinstance(constants[0], int) else 0
            names = constants[1] if isinstance(constants[1], tuple) else ()
            found |= _names_of_import(package or "", level, instruction.argval, names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= imports_of_code(constant, package)
    return frozenset(found)


def imports_of_tree(tree: ast.AST, package: str = "") -> set[str]:
    """Absolute names that a source imports anywhere in it, and those that may be modules.

    Args:
        tree: The source.
        package: Against which relative imports are resolved; without it they are left out.
    """
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
            found |= _names_of_import(package, node.level, node.module or "", names)
    return found


def _names_of_import(package: str, level: int, module: str, names: Iterable[str]) -> set[str]:
    """The module of ``from module import names``, and the names, each of which may be a module of its own."""
    if level:
        if not package:
            return set()
        base = package.rsplit(".", level - 1)[0] if level > 1 else package
        module = f"{base}.{module}" if module else base
    return {module, *(f"{module}.{name}" for name in names if name != "*")}


@functools.lru_cache(maxsize=4096)
def _imports_of_file(path: str, _size: int, _modified: int) -> set[str]:
    """Raises OSError, which is not kept: the file may be readable the next time."""
    with open(path, "rb") as source:
        try:
            return imports_of_tree(parse(source.read()))
        except (SyntaxError, ValueError):
            return set()


@dataclass(frozen=True)
class Shipped:
    """User modules that travel with a job.

    Attributes:
        data: A zip of their sources, and of what else lies in a package of theirs.
        listing: For people: a line for each file with its size, and for each that was left out.
    """

    data: bytes
    listing: str


def zip_modules(names: Iterable[str]) -> Shipped | None:
    """The user modules among ``names``, and those that they import in turn; None if there are none.

    Hidden files and folders (``.env``, ``.ssh``), and what is named like a key or a password, stay here.
    """
    waiting = {name.partition(".")[0] for name in names}
    seen: set[str] = set()
    files: dict[str, str] = {}
    left_out: list[str] = []
    while waiting - seen:
        root = (waiting - seen).pop()
        seen.add(root)
        spec = spec_of(root)
        if spec is None:
            continue
        for archive_name, path in _files_of(root, spec):
            if _is_private(os.path.basename(path)):
                left_out.append(archive_name)
                continue
            files[archive_name] = path
            if path.endswith(".py"):
                with contextlib.suppress(OSError):
                    state = os.stat(path)
                    imported = _imports_of_file(path, state.st_size, state.st_mtime_ns)
                    waiting |= {name.partition(".")[0] for name in imported}
    if not files:
        return None
    if named := [name for name in left_out if not os.path.basename(name).startswith(".")]:
        logger.warning("%s may hold secrets, and do not travel with the job", ", ".join(sorted(named)))
    sizes = {archive_name: os.path.getsize(path) for archive_name, path in files.items()}
    total = sum(sizes.values())
    if total > MODULES_LIMIT:
        raise InvalidJobError(
            f"the user modules {', '.join(sorted(seen))} hold {total >> 20} MiB, over the limit of "
            f"{MODULES_LIMIT >> 20} MiB that travel with a job: install them on the executors instead"
        )
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1, strict_timestamps=False) as archive:
        for archive_name, path in sorted(files.items()):
            archive.write(path, archive_name)
    lines = [f"{sizes[name]:>12}  {name}" for name in sorted(files)]
    lines += [f"{'left out':>12}  {name}" for name in sorted(left_out)]
    return Shipped(buffer.getvalue(), "\n".join(lines) + "\n")


def _is_private(name: str) -> bool:
    return name.startswith(".") or (not name.endswith(".py") and _SECRETS.fullmatch(name) is not None)


def _files_of(root: str, spec: Any) -> Iterator[tuple[str, str]]:
    if not spec.submodule_search_locations:
        yield os.path.basename(spec.origin), spec.origin
        return
    for base in spec.submodule_search_locations:
        for directory, children, names in os.walk(base):
            children[:] = [name for name in children if not name.startswith(".") and name not in _SKIPPED_DIRECTORIES]
            # A folder without __init__.py may be anything that happens to have the name.
            for name in names if spec.origin else [name for name in names if name.endswith(".py")]:
                path = os.path.join(directory, name)
                if os.path.isfile(path):
                    yield os.path.join(root, os.path.relpath(path, base)), path
