"""Checksums of the user's source files that some code imports, found without importing them."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator

from rankzero.submit.imports import imports_of_tree, parse
from rankzero.submit.modules import source_of, spec_of


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
                    state = os.stat(path)
                    is_package = os.path.basename(path) == "__init__.py"
                    package = part if is_package else part.rpartition(".")[0]
                    digests[part], imported = _read(path, state.st_size, state.st_mtime_ns, package)
                    waiting |= imported - seen
    return digests


def digest_of_script(path: str) -> tuple[str, frozenset[str]]:
    """Returns a checksum of a script by its syntax, and the absolute names that it imports. Raises OSError."""
    state = os.stat(path)
    return _read(path, state.st_size, state.st_mtime_ns, "")


def _below(package: str, first: str | None) -> Iterator[str]:
    """Yields the names of all modules in the folders of a user's package."""
    for base in getattr(spec_of(package, first), "submodule_search_locations", None) or []:
        for directory, _, names in os.walk(base):
            parts = os.path.relpath(directory, base).split(os.sep)
            parents = [package, *(part for part in parts if part != os.curdir)]
            yield from (".".join([*parents, name[:-3]]) for name in names if name.endswith(".py"))


@functools.lru_cache(maxsize=4096)
def _read(path: str, _size: int, _modified: int, package: str) -> tuple[str, frozenset[str]]:
    with open(path, "rb") as file:
        source = file.read()
    try:
        tree = parse(source, path)
    except (SyntaxError, ValueError):
        return hashlib.sha256(source).hexdigest(), frozenset()
    # Without line numbers, so that comments and layout do not count.
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), frozenset(imports_of_tree(tree, package))
