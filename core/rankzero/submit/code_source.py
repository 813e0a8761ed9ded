"""Reads Python code without running it: what it imports, and the text that counts when two versions are compared.

The code that Python compiles shows the imports, of a file as of a function. A file counts by its tokens, so that
comments and layout do not count, and a checksum is the same in every version of Python. A function counts by the tokens
of its source if that compiles to the function's code, else by its instructions.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import hashlib
import importlib.util
import inspect
import io
import linecache
import re
import token
import tokenize
import types
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from rankzero import store

_IMPORT_NAME = dis.opmap["IMPORT_NAME"]
_NAME = re.compile(r"""['"]([A-Za-z_]\w*(?:[.:]\w*)+)[%{'"]""")
"""The name of something in a module, or the begin of one up to a placeholder: ``acme.models.Net``, ``acme.{kind}``."""
_LAYOUT = frozenset({tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER})
_MARKS = {tokenize.NEWLINE: "\n", tokenize.INDENT: "\t", tokenize.DEDENT: "\b"}
_OPENED = tuple(getattr(token, name, -1) for name in ("FSTRING_START", "TSTRING_START"))
_CLOSED = tuple(getattr(token, name, -1) for name in ("FSTRING_END", "TSTRING_END"))


class Source(NamedTuple):
    """The facts about code that decide what ships with it and what counts."""

    digest: str = ""  # Checksum of a file's tokens
    imports: frozenset[str] = frozenset()  # Absolute names that it imports anywhere; some may be no modules
    early: frozenset[str] = frozenset()  # Those of them that are imported when the file is imported itself
    texts: frozenset[str] = frozenset()  # Texts with a dot that may name something in a module, or begin such a name


NOTHING = Source()


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
        found = NOTHING
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
    texts = {name.replace(":", ".") for each, _ in nested for name in _NAME.findall(repr(each.co_consts))}
    found = [pair for each, is_run in nested for pair in _imported(each, package, is_run)]
    return Source(
        imports=frozenset(name for name, _ in found),
        early=frozenset(name for name, is_early in found if is_early),
        texts=frozenset(texts),
    )


def _nested(code: types.CodeType, is_run: bool = True) -> Iterator[tuple[types.CodeType, bool]]:
    """Yields a code and the codes in it, and whether each runs when the first one, of a file, is imported."""
    is_run = is_run and not code.co_flags & inspect.CO_OPTIMIZED
    yield code, is_run
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _nested(const, is_run)


def _imported(code: types.CodeType, package: str | None, is_run: bool) -> Iterator[tuple[str, bool]]:
    """Yields the names that a code imports: also ``module.name`` of ``from module import name``, which may be a module.

    The second value is False for an import that does not run, or that only type checkers make.
    """
    if _IMPORT_NAME not in code.co_code[::2]:
        # Instructions take long to list.
        return
    level: Any = None
    names: Any = None
    checked, checked_until = False, 0
    for instruction in dis.get_instructions(code):
        kind, value = instruction.opname, instruction.argval
        if "IF_FALSE" in kind and checked:
            checked_until = value
        checked = value == "TYPE_CHECKING" or (checked and kind in ("TO_BOOL", "EXTENDED_ARG"))
        if kind in ("LOAD_CONST", "LOAD_SMALL_INT"):
            # The compiler pushes the level (0 for absolute imports), then the names, then imports.
            level, names = names, value
        elif kind == "IMPORT_NAME":
            with contextlib.suppress(ImportError):
                module = importlib.util.resolve_name("." * level + value, package)
                for name in (module, *(f"{module}.{name}" for name in names or ())):
                    yield name, is_run and instruction.offset >= checked_until


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
    constants = [
        # The order of a set differs between processes.
        _facts(const)
        if isinstance(const, types.CodeType)
        else sorted(map(repr, const))
        if isinstance(const, frozenset)
        else const
        for const in code.co_consts
    ]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    # The exception table has the ranges of "try" blocks.
    return code.co_code, constants, names, counts, code.co_exceptiontable
