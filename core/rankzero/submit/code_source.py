"""Reads Python code without running it: what it imports, and the text that counts when two versions are compared.

A file is read by its tokens, so that comments and layout do not count, and a checksum is the same in every version of
Python. A function counts by the tokens of its source if that compiles to the function's code, else by its code.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
import io
import itertools
import linecache
import re
import token
import tokenize
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from rankzero import store

IMPORTERS = frozenset(
    {"import_module", "__import__", "iter_modules", "walk_packages", "locate", "resolve_name", "instantiate"}
)
"""Functions of importlib, pkgutil, pydoc and Hydra by which code reaches modules that no statement names."""
_LAZY = frozenset({"_LazyModule", "attach", "attach_stub"})
"""What a package calls that imports its modules once they are asked for, as one with a ``__getattr__`` does."""

_NAME = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*\.?")
"""The name of a module or of something in it, also the begin of one: ``acme.models.Net``, ``acme.``"""
_ABSOLUTE = re.compile(r"[A-Za-z_]\w*(?:[.:]\w+)+")
_STRING = re.compile(r"\w*(\"\"\"|'''|\"|')")
_LAYOUT = frozenset({tokenize.ENCODING, tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER})
_MARKS = {tokenize.NEWLINE: "\n", tokenize.INDENT: "\t", tokenize.DEDENT: "\b"}
_OPENED = tuple(getattr(token, name, -1) for name in ("FSTRING_START", "TSTRING_START"))
_CLOSED = tuple(getattr(token, name, -1) for name in ("FSTRING_END", "TSTRING_END"))
_STARTS = frozenset({"", "\n", "\t", "\b", ";", ":"})
"""Tokens behind which a statement may begin."""


class Source(NamedTuple):
    """The facts about a source that decide what ships with it and what counts.

    Attributes:
        digest: Checksum of its tokens.
        imports: Absolute names that it imports anywhere; some may be no modules.
        early: Those of them that are imported when it is imported itself.
        texts: Texts in it that may name a module, or the begin of such a name.
        computes: True if it names one of `IMPORTERS`, or imports its modules lazily, and so may import by any text.
    """

    digest: str
    imports: frozenset[str] = frozenset()
    early: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()
    computes: bool = False


def source_of_file(path: str, package: str = "") -> Source:
    """Returns the facts about a file. Raises OSError.

    Args:
        path: The file.
        package: Name of the package that its relative imports begin at.
    """
    return _of_file(path, store.fingerprint(path), package)


@functools.lru_cache(maxsize=4096)
def _of_file(path: str, _fingerprint: str, package: str) -> Source:
    with open(path, "rb") as file:
        return read(file.read(), package)


def read(source: bytes, package: str = "") -> Source:
    """Returns the facts about a source; of one that is not Python, only the checksum of its bytes."""
    try:
        words = list(_words(source))
    except (SyntaxError, ValueError, tokenize.TokenError):
        return Source(hashlib.sha256(source).hexdigest())
    imports: set[str] = set()
    early: set[str] = set()
    texts: set[str] = set()
    computes = not (IMPORTERS | _LAZY).isdisjoint(words)
    depth, previous = 0, ""
    # Depth of a block that does not run when the source is imported: a function, or for type checkers alone.
    late: int | None = None
    for index, word in enumerate(words):
        if previous in _STARTS:
            if previous in ("\n", "\b") and word not in ("\t", "\b") and late is not None and depth <= late:
                late = None
            if word in ("import", "from"):
                statement = itertools.takewhile(lambda each: each not in ("\n", ";"), words[index:])
                found = set(_imported([*statement], package))
                imports |= found
                early |= found if late is None else set()
            elif late is None and (word in ("def", "async") or _is_for_checkers(words[index : index + 5])):
                late = depth
        computes |= word == "__getattr__" and not depth
        if word in ("\t", "\b"):
            depth += 1 if word == "\t" else -1
        elif word.endswith(("'", '"')) and (opened := _STRING.match(word)):
            texts.add(word[opened.end() : -len(opened[1])])
        previous = word
    names = [names_in_text(text) for text in texts if computes or _ABSOLUTE.fullmatch(text)]
    digest = hashlib.sha256("\0".join(words).encode(errors="surrogateescape")).hexdigest()
    return Source(digest, frozenset(imports), frozenset(early), frozenset().union(*names), computes)


def _words(source: bytes) -> Iterator[str]:
    """Yields the tokens of a source, with a mark for each end of a line and change of the indentation.

    An f-string is one token, as in Python 3.11. Raises SyntaxError or TokenError.
    """
    begin, nested, lines = (0, 0), 0, source.splitlines()
    for kind, text, start, end, _ in tokenize.tokenize(io.BytesIO(source).readline):
        if kind in _OPENED:
            begin, nested = begin if nested else start, nested + 1
        elif kind in _CLOSED:
            nested -= 1
            if not nested:
                part = lines[begin[0] - 1 : end[0]]
                joined = b"\n".join(part).decode(errors="surrogateescape")
                yield joined[begin[1] : len(joined) - len(part[-1].decode(errors="surrogateescape")) + end[1]]
        elif not nested and kind not in _LAYOUT:
            yield _MARKS.get(kind, text)


def names_in_text(text: str) -> set[str]:
    """Returns what a text may name, up to its first placeholder: "acme.%s" the begin of the name of a module."""
    begin = re.split("[%{]", text)[0].replace(":", ".")
    return {begin} if _NAME.fullmatch(begin) else set()


def _is_for_checkers(words: list[str]) -> bool:
    return words[:1] == ["if"] and "".join(words[1:]).partition(":")[0] in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _imported(words: list[str], package: str) -> Iterator[str]:
    """Yields the names that the words of an import statement import."""
    first, *rest = words
    origin, names = rest, rest
    if first == "from" and "import" in rest:
        origin, names = rest[: rest.index("import")], rest[rest.index("import") + 1 :]
    every = " ".join(name for name in names if name not in "()").replace(" . ", ".").split(",")
    plain = [name.split(" as ")[0].strip() for name in every]
    if first == "import":
        yield from plain
    else:
        base = "".join(origin)
        module = base.lstrip(".")
        yield from names_of_import(package, len(base) - len(module), module, plain)


def names_of_import(package: str, level: int, module: str, names: Iterable[str]) -> set[str]:
    """Returns the module of ``from module import names``, and each ``module.name``, which may be a module, too."""
    if level:
        if not package:
            return set()
        base = package.rsplit(".", level - 1)[0] if level > 1 else package
        module = f"{base}.{module}" if module else base
    return {module, *(f"{module}.{name}" for name in names if name and name != "*")}


# -- functions ---------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def source_of_code(code: types.CodeType, package: str | None, computes: bool = False) -> Source:
    """Returns the facts about the code of a function and of those in it. Its checksum is `digest_of_code`."""
    found: set[str] = set()
    texts: set[str] = set()
    names: set[str] = set()
    for each in _nested(code):
        names |= {*each.co_names}
        texts = texts.union(*(names_in_text(const) for const in each.co_consts if isinstance(const, str)))
        constants: tuple[Any, Any] = (None, None)
        for instruction in dis.get_instructions(each):
            # The compiler pushes the level (0 for absolute imports), then the names, then imports.
            if instruction.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
                constants = (constants[1], instruction.argval)
            elif instruction.opname == "IMPORT_NAME":
                level = constants[0] if isinstance(constants[0], int) else 0
                chosen = constants[1] if isinstance(constants[1], tuple) else ()
                found |= names_of_import(package or "", level, instruction.argval, chosen)
    computes |= bool(IMPORTERS & names)
    return Source("", frozenset(found), frozenset(), frozenset(texts if computes else ()), computes)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _nested(const)


@functools.lru_cache(maxsize=1024)
def words_of_code(code: types.CodeType) -> frozenset[str]:
    """Returns the names and the parts of the texts in code, by which it may reach modules below a package."""
    texts = [const for each in _nested(code) for const in each.co_consts if isinstance(const, str)]
    return frozenset({part for text in texts for part in text.split(".")}.union(*(c.co_names for c in _nested(code))))


@functools.lru_cache(maxsize=1024)
def globals_of_classes(code: types.CodeType) -> frozenset[str]:
    """Returns the globals that class bodies in a function read: annotations of methods, defaults, attributes.

    cloudpickle 3.1 finds only those that functions read.
    """
    found: set[str] = set()
    for each in _nested(code):
        own = {"__name__"}
        for instruction in dis.get_instructions(each):
            if instruction.opname == "STORE_NAME":
                own.add(instruction.argval)
            elif instruction.opname in ("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS") and instruction.argval not in own:
                found.add(instruction.argval)
    return frozenset(found)


@functools.lru_cache(maxsize=1024)
def digest_of_code(code: types.CodeType) -> str:
    """Returns the checksum of a function's source, without its decorators, or else of its instructions.

    The source counts only if it compiles to this code: its file may have been edited since, and code of ``exec`` and
    ``python -c`` has none.
    """
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename)
    if code.co_name != "<lambda>" and code in _compiled("".join(lines), code.co_filename, code.co_flags & _FUTURES):
        words = [*_words("".join(inspect.getblock(lines[code.co_firstlineno - 1 :])).encode())]
        return hashlib.sha256("\0".join(words[words.index("def") :]).encode()).hexdigest()
    return hashlib.sha256(repr(_facts(code)).encode(errors="surrogateescape")).hexdigest()


_FUTURES = annotations.compiler_flag
"""The flag that a cell of a notebook may have by a statement of an earlier one."""


@functools.lru_cache(maxsize=64)
def _compiled(source: str, path: str, flags: int) -> frozenset[types.CodeType]:
    """Returns the code of all functions of a source; empty for one that is not Python, such as a notebook's magics."""
    try:
        return frozenset(_nested(compile(source, path, "exec", flags, dont_inherit=True)))
    except (SyntaxError, ValueError):
        return frozenset()


def _facts(code: types.CodeType) -> tuple[object, ...]:
    """Returns the instructions, constants and names of code, without file names and line numbers."""
    constants = [_constant(const) for const in code.co_consts]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    # The exception table has the ranges of "try" blocks.
    return code.co_code, constants, names, counts, code.co_exceptiontable


def _constant(const: object) -> object:
    if isinstance(const, types.CodeType):
        return _facts(const)
    # The order of a set differs between processes.
    return sorted(map(repr, const)) if isinstance(const, frozenset) else const
