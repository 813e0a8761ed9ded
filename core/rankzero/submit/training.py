"""What is run: a function, a script, a module as a script, or a command. Checked before anything starts."""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import stat
from dataclasses import dataclass
from typing import Any

from rankzero.errors import InvalidJobError
from rankzero.submit.imports import imports_of_tree, parse
from rankzero.submit.modules import source_of, spec_of

MODULE = "-m "
"""With it begins ``train`` where it names a module to be run, as for ``python`` and ``torchrun``."""

COMMAND_FILES_LIMIT = 64 << 20
"""Bytes of the files that a command names and that travel with it."""


@dataclass(frozen=True)
class Script:
    """A Python file.

    Attributes:
        path: Absolute.
    """

    path: str
    line: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For people."""
        return os.path.basename(self.path)

    @property
    def directory(self) -> str:
        """Where its modules are found first."""
        return os.path.dirname(self.path)

    def _source(self) -> bytes:
        with open(self.path, "rb") as file:
            return file.read()

    def imports(self) -> set[str]:
        """Names that it imports. Raises InvalidJobError for what is not Python."""
        try:
            return imports_of_tree(parse(self._source(), self.path))
        except (SyntaxError, ValueError) as error:
            raise InvalidJobError(f"train={self.path!r} is not Python: {error}") from None

    def parts(self) -> dict[str, Any]:
        """What the ranks need."""
        return {"kind": "script", "path": self.path, "source": self._source()}


@dataclass(frozen=True)
class Module:
    """A module or package that is run as ``python -m`` does.

    Attributes:
        name: Absolute.
    """

    name: str
    line: tuple[str, ...] = ()

    @property
    def directory(self) -> str:
        """Where ``python -m`` looks first."""
        return os.getcwd()

    def imports(self) -> set[str]:
        """Itself, and what makes a package run."""
        return {self.name, f"{self.name}.__main__"}

    def parts(self) -> dict[str, Any]:
        """What the ranks need."""
        return {"kind": "module", "name": self.name}


@dataclass(frozen=True)
class Command:
    """A program with its arguments, as for torchrun's ``--no-python``.

    Attributes:
        line: The program, looked for on the ranks' ``PATH``, and its arguments. Files that it names by a relative path
            travel along.
    """

    line: tuple[str, ...]

    @property
    def name(self) -> str:
        """For people."""
        return os.path.basename(self.line[0])

    @property
    def directory(self) -> str:
        """Against which the files are named."""
        return os.getcwd()

    def imports(self) -> set[str]:
        """Nothing is known of what a program needs."""
        return set()

    def parts(self) -> dict[str, Any]:
        """What the ranks need."""
        return {"kind": "command", "files": self.files()}

    def files(self) -> dict[int, dict[str, Any]]:
        """The files that travel, by their place in the line. Raises InvalidJobError if they are too large."""
        found = {}
        for position, word in enumerate(self.line):
            # A shell, too, looks for a program without a slash on PATH alone.
            is_path = not os.path.isabs(word) and (position > 0 or os.sep in word)
            if is_path and os.path.isfile(word):
                path = os.path.abspath(word)
                size = os.path.getsize(path)
                if size > COMMAND_FILES_LIMIT:
                    raise InvalidJobError(
                        f"{word} holds {size >> 20} MiB, over the limit of {COMMAND_FILES_LIMIT >> 20} MiB "
                        "for a file that travels with a command: name it by an absolute path that the ranks see"
                    )
                with open(path, "rb") as file:
                    mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                    found[position] = {"path": path, "data": file.read(), "mode": mode}
        return found


def resolve(train: object) -> Any:
    """What is run: a `Script`, `Module` or `Command`, else the object that shall be called.

    Args:
        train: A callable, ``"path/to/script.py"``, a path object, ``"package.module:function"``,
            ``"-m package.module"``, or a list of words, which are a command.

    Raises:
        InvalidJobError: there is no such script, module, function or program.
    """
    if isinstance(train, (list, tuple)):
        return _command(train)
    if isinstance(train, str) and train.startswith(MODULE):
        return _module(train)
    if isinstance(train, os.PathLike) or (isinstance(train, str) and not is_module_reference(train)):
        path = os.fspath(train)
        absolute = os.path.abspath(os.path.expanduser(path))
        if os.path.isdir(absolute):
            raise InvalidJobError(f"train={path!r} is a directory; give the script in it")
        if not os.path.isfile(absolute):
            raise InvalidJobError(f"train={path!r}: there is no such script (looked at {absolute})")
        return Script(absolute)
    return _function(train) if isinstance(train, str) else train


def is_module_reference(text: str) -> bool:
    """True for ``"package.module:function"`` and ``"-m package.module"``, False for the path of a script."""
    return text.startswith(MODULE) or (":" in text and os.sep not in text and not text.endswith(".py"))


def _command(words: list[Any] | tuple[Any, ...]) -> Command:
    if not words or not all(isinstance(word, (str, os.PathLike)) for word in words):
        raise InvalidJobError(f"train is {words!r}; a command is a list of strings, such as ['bash', 'train.sh']")
    line = tuple(os.fspath(word) for word in words)
    program = line[0]
    if os.sep in program and not os.path.isabs(program) and not os.access(program, os.X_OK):
        raise InvalidJobError(
            f"train={[*line]}: there is no program {program} that may be executed (looked in {os.getcwd()})"
        )
    return Command(line)


def _module(train: str) -> Module:
    name = train.removeprefix(MODULE).strip()
    if not all(part.isidentifier() for part in name.split(".")):
        raise InvalidJobError(f"train={train!r} names no module; write '-m package.module', and its arguments apart")
    root, first = name.partition(".")[0], os.getcwd()
    spec = spec_of(root, first)
    if spec is None and not _is_installed(root, first):
        raise InvalidJobError(f"train={train!r}: there is no module {root!r} in the working directory or sys.path")
    if spec is not None and not any(_is_source(part, first) for part in (name, f"{name}.__main__")):
        raise InvalidJobError(f"train={train!r}: there is no module {name!r}, nor {name}.__main__")
    return Module(name)


def _is_installed(root: str, first: str) -> bool:
    try:
        return bool(importlib.machinery.PathFinder.find_spec(root, [first]) or importlib.util.find_spec(root))
    except (ImportError, ValueError):
        return False


def _is_source(name: str, first: str) -> bool:
    """Returns True for what ``python -m`` runs: a user's module that is no package."""
    path = source_of(name, first)
    return path is not None and os.path.basename(path) != "__init__.py"


def _function(reference: str) -> object:
    module_name, _, attribute = reference.partition(":")
    try:
        found: object = importlib.import_module(module_name)
    except Exception as error:
        raise InvalidJobError(f"train={reference!r}: module {module_name!r} cannot be imported: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise InvalidJobError(f"train={reference!r}: module {module_name!r} has no function {attribute!r}")
        found = getattr(found, part)
    return found


def check_callable(function: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises InvalidJobError for what ranks cannot call, or not with these arguments."""
    if not callable(function):
        raise InvalidJobError(
            f"train is {function!r}; give a function, 'path/to/script.py', 'package.module:function', "
            "'-m package.module' or a list of words that are a command"
        )
    if kind := _kind_of_call(function):
        raise InvalidJobError(f"train={name_of(function)} is {kind} function; ranks call plain functions")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InvalidJobError(f"the arguments do not fit {name_of(function)}{signature}: {error}") from None


def _kind_of_call(function: Any) -> str | None:
    """What a call would give instead of a value, in words; None for a plain function."""
    while isinstance(function, functools.partial):
        function = function.func
    for called in (function, type(function).__call__):
        if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
            return "an async"
        if inspect.isgeneratorfunction(called):
            return "a generator"
    return None


def name_of(function: object) -> str:
    """A function's name, for people."""
    inner = getattr(function, "func", function)
    name = getattr(inner, "__name__", type(inner).__name__)
    return "lambda" if name == "<lambda>" else str(name)
