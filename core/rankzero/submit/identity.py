"""What makes a training the same: its code by content, its arguments by content, the number of its ranks.

Not part of it: inodes, times, retries, where a value lies, comments and the layout of sources. A run of another
identity never lends its checkpoints or its result; a run of the same one never loses them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

from rankzero.job import NumProcesses
from rankzero.submit.content import DIGITS, digest_with_modules
from rankzero.submit.sources import digest_of_modules, digest_of_script
from rankzero.submit.training import Command, Module, Script, resolve, search_path
from rankzero.submit.user_code import UserCode
from rankzero.values.digest import digest_of as digest_of_bytes

logger = logging.getLogger(__name__)


def identity_of(
    train: object,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    world_size: NumProcesses,
    code_version: str | None = None,
    user_code: UserCode | None = None,
    datasets: Sequence[tuple[str, str]] = (),
) -> str:
    """Names a training: the same in every process for the same code, arguments and world size.

    The code is a script, or a function with what it refers to, and the user's modules that these import. A function
    that travels by reference counts by its module.

    Args:
        train: As for `Launcher.run`.
        args: Its positional arguments. A `ResultRef` counts by the checksum of its file.
        kwargs: Its keyword arguments.
        world_size: Number of ranks; of an elastic job the smallest and the largest; or ``"auto"``.
        code_version: Stands for all code, which is not looked at then.
        user_code: What travels because the user says so; counts by content.
        datasets: Name and checksum of each dataset.

    Returns:
        Hexadecimal digits; empty for what cannot be pickled: its submission says what is wrong with it.

    Raises:
        InvalidJobError: ``train`` names no script or function.
    """
    resolved = resolve(train)
    try:
        code = _code_of(resolved) if code_version is None else ("version", code_version)
        arguments, modules = digest_with_modules((args, kwargs))
    except Exception as error:
        # What cannot be pickled is refused by its submission; anything else trains, and is like no other training.
        logger.warning(
            "this training cannot be told from others, so no later try resumes it; give code_version, or plainer "
            "arguments: %s: %s",
            type(error).__name__,
            str(error).splitlines()[0] if str(error) else "",
        )
        return ""
    sources = digest_of_modules(modules) if code_version is None else ""
    archive = user_code.archive if user_code and code_version is None else None
    more = [*([digest_of_bytes([archive])] if archive else []), *([tuple(datasets)] if datasets else [])]
    facts = (code, arguments, sources, world_size, *more)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:DIGITS]


def _code_of(train: Any) -> tuple[str, ...]:
    if isinstance(train, Script):
        digest, imported = digest_of_script(train.path)
        with search_path(train.directory):
            return "script", digest, digest_of_modules(imported)
    if isinstance(train, Module):
        with search_path(train.directory):
            return "module", train.name, digest_of_modules(train.imports())
    if isinstance(train, Command):
        # By content, wherever they lie.
        files = {position: digest_of_bytes([file["data"]]) for position, file in train.files().items()}
        return "command", *(files.get(position, word) for position, word in enumerate(train.line))
    digest, modules = digest_with_modules(train)
    return "function", digest, digest_of_modules(modules)
