"""Which of the user's source files some code comes to, found without importing anything, and what they say."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import itertools
import os
from collections.abc import Iterable

from rankzero.submit.modules import imports_of_tree, parse, spec_of


def digest_of_modules(names: Iterable[str]) -> str:
    """A checksum of the user modules among ``names`` and of those that they import in turn, by their syntax.

    Args:
        names: Absolute names, also of what is no user module, or no module.
    """
    waiting = set(names)
    seen: set[str] = set()
    digests: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        # Importing a.b.c imports a and a.b first.
        for part in itertools.accumulate(name.split("."), "{}.{}".format):
            if part in seen:
                continue
            seen.add(part)
            if path := _path_of(part):
                with contextlib.suppress(OSError):
                    state = os.stat(path)
                    is_package = os.path.basename(path) == "__init__.py"
                    package = part if is_package else part.rpartition(".")[0]
                    digests[part], imported = _read(path, state.st_size, state.st_mtime_ns, package)
                    waiting |= imported - seen
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()


def digest_of_script(path: str) -> tuple[str, frozenset[str]]:
    """A checksum of a script by its syntax, and the absolute names that it imports. Raises OSError, SyntaxError."""
    state = os.stat(path)
    return _read(path, state.st_size, state.st_mtime_ns, "")


def _path_of(name: str) -> str | None:
    """The source file of a user module; None for anything else."""
    root, *rest = name.split(".")
    spec = spec_of(root)
    if spec is None:
        return None
    if not spec.submodule_search_locations:
        return None if rest else spec.origin
    for base in spec.submodule_search_locations:
        place = os.path.join(base, *rest)
        for path in (os.path.join(place, "__init__.py"), f"{place}.py"):
            if os.path.isfile(path):
                return path
    return None


@functools.lru_cache(maxsize=4096)
def _read(path: str, _size: int, _modified: int, package: str) -> tuple[str, frozenset[str]]:
    with open(path, "rb") as file:
        source = file.read()
    try:
        tree = parse(source, path)
    except (SyntaxError, ValueError):
        return hashlib.sha256(source).hexdigest(), frozenset()
    # Without line numbers: comments and layout are not part of it.
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), frozenset(imports_of_tree(tree, package))
