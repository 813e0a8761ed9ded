"""Computes the identity of a training: its code by content, its arguments by content, the number of its ranks.

Inodes, times, retries, the location of a value, comments and the layout of sources are not part of it. A training never
uses checkpoints or results of another identity, and never loses those of its own. Every training has an identity.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Sequence
from typing import Any

from rankzero.kinds import NumProcesses
from rankzero.run.identity import (
    ARGUMENT,
    CODE_VERSION,
    DATASET,
    DIGITS,
    MODULE,
    NUM_PROCESSES,
    SENT_CODE,
    TRAIN,
    Identity,
)
from rankzero.submit.content import digest_with_modules, facts_of_code
from rankzero.submit.modules import digest_of_script, digests_of_modules, is_user_module_name
from rankzero.submit.params import named_arguments
from rankzero.submit.shipping import digests_of_data_files
from rankzero.submit.training import Command, Module, Script, resolve
from rankzero.submit.user_code import UserCode
from rankzero.values.digest import digest_of as digest_of_bytes

MOST_ARGUMENTS = 200
"""Most arguments with a separate checksum; all further ones share one."""


def identity_of(
    train: object,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    world_size: NumProcesses,
    code_version: str | None = None,
    user_code: UserCode | None = None,
    datasets: Sequence[tuple[str, str]] = (),
) -> Identity:
    """Returns the identity of a training, equal in every process for the same code, arguments and world size.

    The code is a script, or a function with the objects that it refers to, and the user's modules that these import,
    with the data files that are shipped with their packages. A function that is pickled by reference counts by its
    instructions and its module.

    Args:
        train: As for `Launcher.run`.
        args: Positional arguments. A `ResultRef` counts by the checksum of its file.
        kwargs: Keyword arguments.
        world_size: Number of ranks; for an elastic job the smallest and the largest; or ``"auto"``.
        code_version: Replaces the checksums of all code, which is then not read.
        user_code: The user's ``working_dir`` and ``py_files``; counts by content.
        datasets: Name and checksum of each dataset.

    Raises:
        InvalidJobError: ``train`` names no script or function, or its modules are too large to be shipped.
    """
    resolved = resolve(train)
    parts = {NUM_PROCESSES: repr(world_size)}
    parts |= {f"{DATASET}{name}": digest for name, digest in datasets}
    needed: set[str] = set()
    arguments = named_arguments(resolved, args, kwargs)
    named = arguments if len(arguments) <= MOST_ARGUMENTS else arguments[:MOST_ARGUMENTS]
    for name, value in [*named, *([("...", arguments[MOST_ARGUMENTS:])] if named is not arguments else [])]:
        digest, modules = digest_with_modules(value, f"the argument {name}")
        parts[f"{ARGUMENT}{name}"] = digest[:DIGITS]
        needed |= modules
    if code_version is not None:
        return Identity.of(parts, **{CODE_VERSION: _short(repr(code_version))})
    own, modules_of_code = _code_of(resolved)
    if archive := user_code.archive if user_code else None:
        parts[SENT_CODE] = _short(digest_of_bytes([archive]))
    modules_by_name = digests_of_modules(needed) | modules_of_code
    parts |= {f"{MODULE}{name}": digest[:DIGITS] for name, digest in modules_by_name.items()}
    data = digests_of_data_files(modules_by_name, getattr(resolved, "directory", None))
    parts |= {f"{MODULE}{name} (data files)": digest[:DIGITS] for name, digest in data.items()}
    return Identity.of(parts, **{TRAIN: own})


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def _code_of(train: Any) -> tuple[str, dict[str, str]]:
    """Returns the checksum of the function, script or module, and those of the user's modules that it imports."""
    if isinstance(train, Script):
        digest, imported = digest_of_script(train.path)
        return _short(repr(("script", digest))), digests_of_modules(imported, train.directory)
    if isinstance(train, Module):
        modules = digests_of_modules(train.imports(), train.directory)
        own = {name: modules[name] for name in sorted(train.imports() & modules.keys())}
        return _short(repr(("module", train.name, own))), modules
    if isinstance(train, Command):
        # Files count by content, and not by path.
        files = {position: digest_of_bytes([file["data"]]) for position, file in train.files().items()}
        return _short(repr(("command", [files.get(n, word) for n, word in enumerate(train.line)]))), {}
    digest, needed = digest_with_modules(train, "the function")
    code, more = digest_with_modules(_own_code(train), "the function")
    return _short(repr(("function", digest, code))), digests_of_modules(needed | more)


def _own_code(train: Any) -> Any:
    """Returns the facts of a user function's code, even if it is pickled by reference; None for other callables."""
    while isinstance(train, functools.partial):
        train = train.func
    train = getattr(train, "__func__", train)
    if not isinstance(train, types.FunctionType):
        train = inspect.getattr_static(type(train), "__call__", None)
    is_user_s = isinstance(train, types.FunctionType) and _is_user_s(getattr(train, "__module__", None))
    return facts_of_code(train.__code__) if is_user_s else None


def _is_user_s(module: str | None) -> bool:
    """Returns False for an installed module: another version of a package does not change the identity."""
    return module is None or module not in sys.modules or module == "__main__" or is_user_module_name(module)
