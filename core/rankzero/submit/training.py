"""Resolves ``train`` to a function, a script, a module or a command, and checks it before anything starts."""

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
from rankzero.submit.code_files import Needs
from rankzero.submit.code_modules import forget_places, spec_of
from rankzero.submit.code_source import source_of_file

MODULE = "-m "
"""Prefix of a ``train`` that names a module to run, as for ``python`` and ``torchrun``."""

COMMAND_FILES_LIMIT = 64 << 20
"""Most bytes of a file that a command names and that is shipped with it."""


@dataclass(frozen=True)
class Script:
    """A Python file that is run as a script.

    Attributes:
        path: Absolute path of the file.
        line: First words of its command line.
    """

    path: str
    line: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Display name: the file's base name."""
        return os.path.basename(self.path)

    @property
    def directory(self) -> str:
        """Directory of the script, in which its modules are searched first."""
        return os.path.dirname(self.path)

    def _source(self) -> bytes:
        with open(self.path, "rb") as file:
            return file.read()

    def needs(self) -> Needs:
        """Returns what the script needs of the user's modules. Raises InvalidJobError if it is not Python."""
        try:
            compile(self._source(), self.path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise InvalidJobError(f"train={self.path!r} is not Python: {error}") from None
        needs = Needs(first=self.directory)
        needs.add(source_of_file(self.path))
        return needs

    def parts(self) -> dict[str, Any]:
        """Returns the payload's fields for ranks: the source and the path."""
        return {"kind": "script", "path": self.path, "source": self._source()}


@dataclass(frozen=True)
class Module:
    """A module or package that is run as with ``python -m``.

    Attributes:
        name: Absolute name of the module.
        line: First words of its command line.
    """

    name: str
    line: tuple[str, ...] = ()

    @property
    def directory(self) -> str:
        """The working directory, which ``python -m`` searches first."""
        return os.getcwd()

    def needs(self) -> Needs:
        """Returns that ranks need the module, and its ``__main__``, which runs a package."""
        return Needs({self.name, f"{self.name}.__main__"}, first=self.directory)

    def parts(self) -> dict[str, Any]:
        """Returns the payload's fields for ranks: the module's name."""
        return {"kind": "module", "name": self.name}


@dataclass(frozen=True)
class Command:
    """A program with its arguments, as for torchrun's ``--no-python``.

    Attributes:
        line: The program, searched on the ranks' ``PATH``, and its arguments. Files that are named by a relative
            path are shipped, too.
    """

    line: tuple[str, ...]

    @property
    def name(self) -> str:
        """Display name: the program's base name."""
        return os.path.basename(self.line[0])

    @property
    def directory(self) -> str:
        """The working directory, to which the paths of files are relative."""
        return os.getcwd()

    def needs(self) -> Needs:
        """Returns no needs, since those of a program are unknown."""
        return Needs(first=self.directory)

    def parts(self) -> dict[str, Any]:
        """Returns the payload's fields for ranks: the shipped files."""
        return {"kind": "command", "files": self.files()}

    def files(self) -> dict[int, dict[str, Any]]:
        """Returns the files to ship, by their position in the line. Raises InvalidJobError if one is too large."""
        found = {}
        for position, word in enumerate(self.line):
            # Like a shell, which searches a program without a slash only on PATH.
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
    """Resolves ``train`` to a `Script`, `Module` or `Command`, or to the object that ranks call.

    Args:
        train: A callable, ``"path/to/script.py"``, a path object, ``"package.module:function"``,
            ``"-m package.module"``, or a list of words, which are a command.

    Raises:
        InvalidJobError: there is no such script, module, function or program.
    """
    forget_places()
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
            raise InvalidJobError(f"train={path!r}: there is no such script (looked at {absolute})", code="RZ-1005")
        return Script(absolute)
    found: Any = _function(train) if isinstance(train, str) else train
    # The plain function of `rankzero.distributed`: the launcher that was asked runs it.
    return found.launch_function if hasattr(type(found), "launch_function") else found


def is_module_reference(text: str) -> bool:
    """Returns True for ``"package.module:function"`` and ``"-m package.module"``, False for the path of a script."""
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
    """Returns True for a user's module that is no package, which ``python -m`` can run."""
    spec = spec_of(name, first)
    return spec is not None and not spec.submodule_search_locations


def _function(reference: str) -> object:
    module_name, _, attribute = reference.partition(":")
    try:
        found: object = importlib.import_module(module_name)
    except Exception as error:
        raise InvalidJobError(
            f"train={reference!r}: module {module_name!r} cannot be imported: {error}", code="RZ-1006"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise InvalidJobError(f"train={reference!r}: module {module_name!r} has no function {attribute!r}")
        found = getattr(found, part)
    return found


def check_callable(function: object, args: tuple[Any, ...], kwargs: dict[str, Any], *, are_all: bool = True) -> None:
    """Raises InvalidJobError unless ranks can call the object with these arguments.

    Args:
        function: The object.
        args: Positional arguments.
        kwargs: Keyword arguments.
        are_all: False if further arguments may follow.
    """
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
        (signature.bind if are_all else signature.bind_partial)(*args, **kwargs)
    except TypeError as error:
        raise InvalidJobError(
            f"the arguments do not fit {name_of(function)}{signature}: {error}", code="RZ-1003"
        ) from None


def _kind_of_call(function: Any) -> str | None:
    """Returns "an async" or "a generator" for a function of that kind; None for a plain function."""
    while isinstance(function, functools.partial):
        function = function.func
    for called in (function, type(function).__call__):
        if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
            return "an async"
        if inspect.isgeneratorfunction(called):
            return "a generator"
    return None


def name_of(function: object) -> str:
    """Returns the display name of a function."""
    inner = getattr(function, "func", function)
    name = getattr(inner, "__name__", type(inner).__name__)
    return "lambda" if name == "<lambda>" else str(name)
