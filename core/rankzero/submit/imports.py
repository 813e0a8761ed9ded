"""Finds the imports of code without running it: in sources by their syntax, in functions by their instructions."""

from __future__ import annotations

import ast
import dis
import functools
import gc
import re
import sys
import threading
import types
from collections.abc import Iterable, Iterator
from typing import Any

from rankzero.host.processes import fork_safe

_PARSING = fork_safe(threading.Lock())


def parse(source: str | bytes, filename: str = "<unknown>") -> ast.Module:
    """Parses a source, one at a time: in CPython 3.11 and 3.12 all parsers of a process share one count of the depth.

    Garbage collection is off meanwhile: its finalizers may print a traceback, which parses, or switch threads.
    """
    with _PARSING:
        collects = gc.isenabled()
        gc.disable()
        try:
            return ast.parse(source, filename)
        finally:
            if collects:
                gc.enable()


@functools.lru_cache(maxsize=1024)
def imports_of_code(code: types.CodeType, package: str | None) -> frozenset[str]:
    """Returns the absolute names that code and its nested functions import when they run; some may be no modules."""
    found: set[str] = set()
    constants: tuple[Any, Any] = (None, None)
    if _IMPORTERS & set(code.co_names):
        texts = [_before_placeholder(constant) for constant in code.co_consts if isinstance(constant, str)]
        found |= {_of_computed(text) for text in texts if _DOTTED.fullmatch(text)}
    for instruction in dis.get_instructions(code):
        # The compiler pushes the level (0 for absolute imports), then the names, then imports.
        if instruction.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            constants = (constants[1], instruction.argval)
        elif instruction.opname == "IMPORT_NAME":
            level = constants[0] if isinstance(constants[0], int) else 0
            names = constants[1] if isinstance(constants[1], tuple) else ()
            found |= names_of_import(package or "", level, instruction.argval, names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= imports_of_code(constant, package)
    return frozenset(found)


def submodules_of_code(code: types.CodeType, packages: Iterable[str]) -> set[str]:
    """Returns the loaded modules that code reaches by attributes of modules, also as ``getattr(acme, "models")``.

    Args:
        code: The code of a function, with its nested functions.
        packages: Names of the modules that the code refers to.
    """
    names = _names_of(code)
    found = set()
    for package in packages:
        below = loaded_below([package])
        found |= {name for name in below if names.issuperset(name.removeprefix(f"{package}.").split("."))}
    return found


@functools.lru_cache(maxsize=1024)
def _names_of(code: types.CodeType) -> frozenset[str]:
    nested = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    texts = {part for constant in code.co_consts if isinstance(constant, str) for part in constant.split(".")}
    return frozenset({*code.co_names, *texts}).union(*map(_names_of, nested))


def loaded_below(packages: Iterable[str]) -> set[str]:
    """Returns the names of the loaded modules below packages."""
    beginnings = tuple(f"{package}." for package in packages)
    return {name for name in list(sys.modules) if name.startswith(beginnings)}


@functools.lru_cache(maxsize=1024)
def globals_of_classes(code: types.CodeType) -> frozenset[str]:
    """Returns the globals that class bodies in a function read: annotations of methods, defaults, attributes.

    cloudpickle 3.1 finds only those that functions read.
    """
    found: set[str] = set()
    own = {"__name__"}
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_NAME":
            own.add(instruction.argval)
        elif instruction.opname in ("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS") and instruction.argval not in own:
            found.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= globals_of_classes(constant)
    return frozenset(found)


def imports_of_tree(tree: ast.Module, source: bytes, package: str = "") -> set[str]:
    """Returns the absolute names that a source imports anywhere; some may be no modules.

    A computed name, ``import_module(f"models.{kind}")``, is returned by its beginning: ``models.*``. If the beginning
    is computed, too, or if the source looks modules up (``pkgutil.iter_modules``), the code may import anything in its
    own top-level package: ``acme.*``.

    Args:
        tree: The syntax tree of the source.
        source: The source. Expressions, nine of ten nodes, are only searched if it holds the name of a function that
            imports.
        package: The package of the source; without it relative imports and unknown names are left out.
    """
    found: set[str] = set()
    for node in ast.walk(tree) if _CALLS.search(source) else _statements(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
            found |= names_of_import(package, node.level, node.module or "", names)
        elif isinstance(node, ast.Call) and (called := _name_of_call(node)) in _IMPORTERS | _SEARCHERS:
            text = _leading_text(node.args[0]) if node.args and called in _IMPORTERS else ""
            if _DOTTED.fullmatch(text):
                found.add(_of_computed(text))
            elif package:
                found.add(f"{package.partition('.')[0]}.*")
    return found


_IMPORTERS = frozenset({"import_module", "__import__"})
_SEARCHERS = frozenset({"iter_modules", "walk_packages", "locate", "instantiate"})
"""Functions of pkgutil, pydoc and Hydra that find modules which no source names."""

_CALLS = re.compile("|".join(_IMPORTERS | _SEARCHERS).encode())

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.\w+)*\.?")


def modules_in_text(source: bytes, package: str) -> frozenset[str] | None:
    """Returns the absolute names after ``import`` and ``from`` in a source, and in its texts and comments.

    It takes a tenth of the time of parsing, and misses none: ``from a import b`` gives ``a`` alone, though. None if
    only the syntax tree can tell: the source may compute names, or a word behind these is no plain name.
    """
    if _CALLS.search(source):
        return None
    found: set[str] = set()
    for origin, names in _IN_TEXT.findall(source.replace(b"\\\n", b" ").replace(b"\\\r\n", b" ")):
        modules = [re.split(rb"\s+as\s", part)[0] for part in names.split(b",") if part.strip()]
        for module in (b"".join(part.split()) for part in modules or [origin]):
            # Words of a comment or a text may hide an import behind them.
            if not _MODULE.fullmatch(module):
                return None
            name = module.decode().lstrip(".")
            found |= names_of_import(package, len(module) - len(name), name, ())
    return frozenset(found)


_MODULE = re.compile(rb"\.+|\.*[A-Za-z_]\w*(\.\w+)*")
_IN_TEXT = re.compile(rb"\bfrom\b([^\r\n;#]*?)\bimport\b|\bimport\b([^\r\n;#]*)")


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields all statements of a tree, with the nested ones."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for field in _BLOCKS:
            waiting += getattr(node, field, ())


_BLOCKS = ("body", "orelse", "handlers", "finalbody", "cases")
"""Fields of statements that hold further statements."""


def _name_of_call(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _leading_text(node: ast.AST) -> str:
    """Returns the constant text that an expression's value begins with; empty if there is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _before_placeholder(node.value)
    if isinstance(node, ast.JoinedStr) and node.values:
        return _leading_text(node.values[0])
    if isinstance(node, ast.BinOp):
        return _leading_text(node.left)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return _leading_text(node.func.value)
    return ""


def _before_placeholder(text: str) -> str:
    return re.split("[%{]", text)[0]


def _of_computed(text: str) -> str:
    return f"{text}*" if text.endswith(".") else text


def names_of_import(package: str, level: int, module: str, names: Iterable[str]) -> set[str]:
    """Returns the module of ``from module import names``, and each ``module.name``, which may be a module, too."""
    if level:
        if not package:
            return set()
        base = package.rsplit(".", level - 1)[0] if level > 1 else package
        module = f"{base}.{module}" if module else base
    return {module, *(f"{module}.{name}" for name in names if name != "*")}
