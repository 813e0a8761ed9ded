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
from typing import Any

from rankzero.kinds import NumProcesses
from rankzero.run.identity import (
    ARGUMENT,
    CODE_VERSION,
    DIGITS,
    MODULE,
    NUM_PROCESSES,
    SENT_CODE,
    TRAIN,
    Identity,
)
from rankzero.submit.content import Code, digest_with_code, facts_of_code
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

    Raises:
        InvalidJobError: ``train`` names no script or function, or its modules are too large to be shipped.
    """
    resolved = resolve(train)
    parts = {NUM_PROCESSES: repr(world_size)}
    code = Code()
    arguments = named_arguments(resolved, args, kwargs)
    named = arguments if len(arguments) <= MOST_ARGUMENTS else arguments[:MOST_ARGUMENTS]
    for name, value in [*named, *([("...", arguments[MOST_ARGUMENTS:])] if named is not arguments else [])]:
        parts[f"{ARGUMENT}{name}"] = digest_with_code(value, f"the argument {name}", code)[:DIGITS]
    if code_version is not None:
        return Identity.of(parts, **{CODE_VERSION: _short(repr(code_version))})
    modules: dict[str, str] = {}
    by_value: dict[str, str] = {}
    if isinstance(resolved, (Script, Module, Command)):
        own, modules = _code_of_program(resolved)
    else:
        own, by_value = _code_of_function(resolved, code)
    if archive := user_code.archive if user_code else None:
        parts[SENT_CODE] = _short(digest_of_bytes([archive]))
    modules = digests_of_modules(code.modules) | modules
    parts |= {f"{MODULE}{name}": digest[:DIGITS] for name, digest in modules.items()}
    data = digests_of_data_files(modules, getattr(resolved, "directory", None))
    parts |= {f"{MODULE}{name} (data files)": digest[:DIGITS] for name, digest in data.items()}
    for module, digest in by_value.items():
        # A module may also be imported when the function is called.
        name = f"{MODULE}{code.name_of(module)}"
        parts[name] = _short(repr((parts.get(name), digest)))
    return Identity.of(parts, **{TRAIN: own})


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def _code_of_program(train: Script | Module | Command) -> tuple[str, dict[str, str]]:
    """Returns the checksum of a script, module or command, and those of the user's modules that it imports."""
    if isinstance(train, Script):
        digest, imported = digest_of_script(train.path)
        return _short(repr(("script", digest))), digests_of_modules(imported, train.directory)
    if isinstance(train, Module):
        modules = digests_of_modules(train.imports(), train.directory)
        own = {name: modules[name] for name in sorted(train.imports() & modules.keys())}
        return _short(repr(("module", train.name, own))), modules
    # Files count by content, and not by path.
    files = {position: digest_of_bytes([file["data"]]) for position, file in train.files().items()}
    return _short(repr(("command", [files.get(n, word) for n, word in enumerate(train.line)]))), {}


def _code_of_function(train: Any, code: Code) -> tuple[str, dict[str, str]]:
    """Returns the checksum of a function, and those of the code that is pickled by value, by module.

    Code in the function's own module counts for the function. Code in other modules, which may be deployed while the
    ranks train, counts for these modules.

    Args:
        train: Any callable.
        code: The code that the arguments refer to, and then also the code that the function refers to.
    """
    entry_point = train
    while isinstance(entry_point, functools.partial):
        entry_point = entry_point.func
    entry_point = inspect.unwrap(getattr(entry_point, "__func__", entry_point))
    module = getattr(entry_point, "__module__", None) or ""
    code.add(module, "", train, key=(train,))
    by_value = code.digests()
    own = digest_with_code(_own_code(entry_point), "the function")
    return _short(repr(("function", by_value.pop(module), own))), by_value


def _own_code(function: Any) -> Any:
    """Returns the facts of a user function's code, even if it is pickled by reference; None for other callables."""
    if not isinstance(function, types.FunctionType):
        function = inspect.getattr_static(type(function), "__call__", None)
    is_user_s = isinstance(function, types.FunctionType) and _is_user_s(getattr(function, "__module__", None))
    return facts_of_code(function.__code__) if is_user_s else None


def _is_user_s(module: str | None) -> bool:
    """Returns False for an installed module: another version of a package does not change the identity."""
    return module is None or module not in sys.modules or module == "__main__" or is_user_module_name(module)
