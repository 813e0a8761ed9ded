"""Decides which modules are the user's and what is sent by value or by name, and reads code without running it.

A module is the user's if no package installer put it where it is. It is sent as files if it can be found by its name
and imported without an orchestrator, which executors do not have. All else of the user is sent by value: ``__main__``,
notebooks, DAG files under synthetic names, and modules that import an orchestrator. Nothing is imported to decide this.

The code that Python compiles shows the imports. A file counts by its tokens, so that a checksum is the same in every
version of Python; a function by those of its source if that compiles to the function's code, else by its instructions.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import glob
import hashlib
import importlib.util
import inspect
import io
import itertools
import linecache
import os
import re
import sys
import token
import tokenize
import types
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from rankzero import store
from rankzero.store.location import BESIDE, is_user_file

ORCHESTRATORS = frozenset({"airflow", "dagster", "airflow_rankzero", "dagster_rankzero"})
NEVER_SHIPPED = BESIDE | ORCHESTRATORS | sys.stdlib_module_names


@functools.lru_cache(maxsize=1024)
def _is_install_target(directory: str) -> bool:
    """Returns True for a folder that a package installer filled (``pip install --target``)."""
    return bool(glob.glob(os.path.join(glob.escape(directory or "."), "*.dist-info")))


def spec_of(root: str, first: str | None = None) -> Any:
    """Returns the spec of a user's top-level module that can be found by its name, else None. Imports nothing."""
    spec = None if root in NEVER_SHIPPED else _find(root, None if first is None else (first, *sys.path))
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or []) or [spec.origin or ""]
    is_user_s = all(place and is_user_file(place) for place in places)
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
    """Returns every name that may be a user's top-level module's: `spec_of` takes too long to ask for any text."""
    names = set(sys.modules)
    for place in filter(lambda place: is_user_file(os.path.abspath(f"{place or '.'}/_")), {first or "", *sys.path}):
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


def is_sent_by_value(module: str) -> bool:
    """Returns True for a loaded module of the user, or one below such a module, that does not travel as files."""
    files = (getattr(sys.modules.get(part), "__file__", None) for part in parents_of(module))
    is_user_s = any(isinstance(file, str) and is_user_file(file) for file in files)
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


_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8  # Py_TPFLAGS_HEAPTYPE and Py_TPFLAGS_IMMUTABLETYPE of CPython


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


# -- what code says --------------------------------------------------------------------------------

_IMPORT_NAME = dis.opmap["IMPORT_NAME"]
_TEXT = re.compile(r"""['"]([A-Za-z_]\w*(?:[.:]\w*)*)[%{'"]""")
"""The name of something in a module, or the begin of one up to a placeholder: ``acme.models.Net``, ``acme.{kind}``."""
IMPORTERS = frozenset({"import_module", "__import__", "locate", "resolve_name", "instantiate"})
"""Names of functions that import by a text. In code that has one, a text of one word may name a module, too."""
_LAYOUT = frozenset({tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER})
_MARKS = {tokenize.NEWLINE: "\n", tokenize.INDENT: "\t", tokenize.DEDENT: "\b"}
_OPENED = tuple(getattr(token, name, -1) for name in ("FSTRING_START", "TSTRING_START"))
_CLOSED = tuple(getattr(token, name, -1) for name in ("FSTRING_END", "TSTRING_END"))


class Source(NamedTuple):
    """The facts about code that decide what ships with it and what counts."""

    digest: str = ""  # Checksum of a file's tokens
    imports: frozenset[str] = frozenset()  # Absolute names that it imports anywhere; some may be no modules
    early: frozenset[str] = frozenset()  # Those of them that are imported when the file is imported itself
    texts: frozenset[str] = frozenset()  # Texts that may name something in a module, or begin such a name
    computes: bool = False  # Whether it has one of `IMPORTERS`


def source_of_file(path: str, package: str = "") -> Source:
    """Returns the facts about a file, whose relative imports begin at a package. Raises OSError."""
    return _of_file(path, store.fingerprint(path), package)


@functools.lru_cache(maxsize=4096)
def _of_file(path: str, _fingerprint: str, package: str) -> Source:
    with open(path, "rb") as file:
        source = file.read()
    try:
        # Not kept beside the facts.
        found = source_of_code.__wrapped__(to_code(source, path, optimize=0), package)
    except (SyntaxError, ValueError):
        found = Source()
    return found._replace(digest=digest_of_source(source))


def to_code(source: str | bytes, path: str, *, optimize: int = -1) -> types.CodeType:
    """Compiles a file. What Python warns of is shown, or an error, where it runs. Raises SyntaxError or ValueError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code: types.CodeType = compile(source, path, "exec", dont_inherit=True, optimize=optimize)
    return code


def digest_of_source(source: bytes) -> str:
    """Returns the checksum of the tokens of a source; of one that is not Python, of its bytes."""
    try:
        return _digest("\0".join(_words(importlib.util.decode_source(source))))
    except (SyntaxError, ValueError, tokenize.TokenError):
        return hashlib.sha256(source).hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _words(source: str) -> Iterator[str]:
    """Yields the tokens of a source, with a mark for each end of a line and change of the indentation.

    An f-string is one token, as in Python 3.11. Raises SyntaxError or TokenError.
    """
    begin, nested, lines = (0, 0), 0, io.StringIO(source).readlines()
    for kind, text, start, end, _ in tokenize.generate_tokens(io.StringIO(source).readline):
        if kind in _OPENED:
            begin, nested = begin if nested else start, nested + 1
        elif kind in _CLOSED:
            nested -= 1
            if not nested:
                part = lines[begin[0] - 1 : end[0]]
                part[-1] = part[-1][: end[1]]
                yield "".join(part)[begin[1] :]
        elif not nested and kind not in _LAYOUT:
            yield _MARKS.get(kind, text)


@functools.lru_cache(maxsize=1024)
def source_of_code(code: types.CodeType, package: str | None) -> Source:
    """Returns the facts about code with the functions and classes in it; relative imports begin at the package."""
    nested = list(_nested(code))
    # The compiler makes tuples of texts, too.
    texts = {name for each, _ in nested for name in _TEXT.findall(repr(each.co_consts))}
    computes = any(not IMPORTERS.isdisjoint(each.co_names) for each, _ in nested)
    found = [pair for each, is_run in nested for pair in _imported(each, package, is_run)]
    return Source(
        imports=frozenset(name for name, _ in found),
        early=frozenset(name for name, is_early in found if is_early),
        texts=frozenset(text.replace(":", ".") for text in texts if computes or not text.isidentifier()),
        computes=computes,
    )


def _nested(code: types.CodeType, is_run: bool = True) -> Iterator[tuple[types.CodeType, bool]]:
    """Yields a code and the codes in it, and whether each runs when the first one, of a file, is imported."""
    is_run = is_run and not code.co_flags & inspect.CO_OPTIMIZED
    yield code, is_run
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _nested(const, is_run)


def _imported(code: types.CodeType, package: str | None, is_run: bool) -> Iterator[tuple[str, bool]]:
    """Yields the names that a code imports, also ``module.name`` of ``from module import name``, and ``is_run``."""
    if _IMPORT_NAME not in code.co_code[::2]:
        # Instructions take long to list.
        return
    level: Any = None
    names: Any = None
    for instruction in dis.get_instructions(code):
        kind, value = instruction.opname, instruction.argval
        if kind in ("LOAD_CONST", "LOAD_SMALL_INT"):
            # The compiler pushes the level (0 for absolute imports), then the names, then imports.
            level, names = names, value
        elif kind == "IMPORT_NAME":
            with contextlib.suppress(ImportError):
                module = importlib.util.resolve_name("." * level + value, package)
                for name in (module, *(f"{module}.{name}" for name in names or ())):
                    yield name, is_run


@functools.lru_cache(maxsize=1024)
def digest_of_code(code: types.CodeType) -> str:
    """Returns the checksum of a function's source, without its decorators, or else of its instructions.

    The source counts only if it compiles to this code: its file may have been edited since, and code of ``exec`` and
    ``python -c`` has none.
    """
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename)
    if code.co_name != "<lambda>" and code in _compiled("".join(lines), code.co_filename):
        words = [*_words("".join(inspect.getblock(lines[code.co_firstlineno - 1 :])))]
        return _digest("\0".join(words[words.index("def") :]))
    return _digest(repr(_facts(code)))


@functools.lru_cache(maxsize=64)
def _compiled(source: str, path: str) -> frozenset[types.CodeType]:
    """Returns the code of all functions of a source; empty for one that is not Python, such as a notebook's magics."""
    try:
        return frozenset(each for each, _ in _nested(to_code(source, path)))
    except (SyntaxError, ValueError):
        return frozenset()


def _facts(code: types.CodeType) -> tuple[object, ...]:
    """Returns the instructions, constants and names of code, without file names and line numbers."""
    nested = [_facts(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    # The order of a set differs between processes.
    constants = [
        sorted(map(repr, const)) if isinstance(const, frozenset) else const
        for const in code.co_consts
        if not isinstance(const, types.CodeType)
    ]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    # The exception table has the ranges of "try" blocks.
    return code.co_code, nested, constants, names, counts, code.co_exceptiontable
