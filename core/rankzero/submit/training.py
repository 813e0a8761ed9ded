"""Resolves ``train`` to a function, a script, a module or a command, and checks it before anything starts."""

from __future__ import annotations

import importlib
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
class Program:
    """What ranks run that is no function.

    Attributes:
        kind: ``"script"`` for a Python file, ``"module"`` as for ``python -m``, ``"command"`` as for torchrun's
            ``--no-python``.
        target: Absolute path of the script, name of the module, or the program.
        line: The first words of the command line, of which the first is a command's program. Files that they name by
            relative paths are shipped with a command.
    """

    kind: str
    target: str
    line: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Display name."""
        return self.target if self.kind == "module" else os.path.basename(self.target)

    def source(self) -> bytes:
        """Returns the text of a script."""
        with open(self.target, "rb") as file:
            return file.read()

    def needs(self) -> Needs:
        """Returns what the program needs of the user's modules. Raises InvalidJobError for a script with an error."""
        if self.kind != "script":
            # A package is run by its module `__main__`. The needs of a command are unknown.
            names = {self.target, f"{self.target}.__main__"} if self.kind == "module" else set[str]()
            return Needs(names, first=os.getcwd())
        try:
            compile(self.source(), self.target, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise InvalidJobError(f"train={self.target!r} is not Python: {error}") from None
        needs = Needs(first=os.path.dirname(self.target))
        needs.add(source_of_file(self.target))
        return needs

    def parts(self) -> dict[str, Any]:
        """Returns the payload's fields for ranks."""
        if self.kind == "script":
            return {"kind": self.kind, "path": self.target, "source": self.source()}
        return {"kind": self.kind} | ({"name": self.target} if self.kind == "module" else {"files": self.files()})

    def files(self) -> dict[int, dict[str, Any]]:
        """Returns the files of a command, by their position. Raises InvalidJobError if one is too large."""
        found = {}
        for position, word in enumerate(self.line):
            # Like a shell, which searches a program without a slash only on PATH.
            is_path = not os.path.isabs(word) and (position > 0 or os.sep in word)
            if is_path and os.path.isfile(word):
                if (size := os.path.getsize(word)) > COMMAND_FILES_LIMIT:
                    raise InvalidJobError(
                        f"{word} holds {size >> 20} MiB, over the limit of {COMMAND_FILES_LIMIT >> 20} MiB "
                        "for a file that travels with a command: name it by an absolute path that the ranks see"
                    )
                with open(word, "rb") as file:
                    mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                    found[position] = {"path": os.path.abspath(word), "data": file.read(), "mode": mode}
        return found


def resolve(train: object) -> Any:
    """Resolves ``train`` to a `Program`, or to the object that ranks call.

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
        if not os.path.isfile(absolute):
            raise InvalidJobError(f"train={path!r}: there is no such script (looked at {absolute})", code="RZ-1005")
        return Program("script", absolute)
    found: Any = _function(train) if isinstance(train, str) else train
    # The plain function of `rankzero.distributed`: the launcher that was asked runs it.
    return found.launch_function if hasattr(type(found), "launch_function") else found


def is_module_reference(text: str) -> bool:
    """Returns True for ``"package.module:function"`` and ``"-m package.module"``, False for the path of a script."""
    return text.startswith(MODULE) or (":" in text and os.sep not in text and not text.endswith(".py"))


def _command(words: list[Any] | tuple[Any, ...]) -> Program:
    if not words or not all(isinstance(word, (str, os.PathLike)) for word in words):
        raise InvalidJobError(f"train is {words!r}; a command is a list of strings, such as ['bash', 'train.sh']")
    line = tuple(os.fspath(word) for word in words)
    if os.sep in line[0] and not os.path.isabs(line[0]) and not os.access(line[0], os.X_OK):
        raise InvalidJobError(f"train={[*line]}: there is no program {line[0]} in {os.getcwd()} that may be executed")
    return Program("command", line[0], line)


def _module(train: str) -> Program:
    name = train.removeprefix(MODULE).strip()
    if not all(part.isidentifier() for part in name.split(".")):
        raise InvalidJobError(f"train={train!r} names no module; write '-m package.module', and its arguments apart")
    root, place = name.partition(".")[0], os.getcwd()
    # A package of the user's is complete here, and an installed one where the ranks are.
    if not (spec_of(name, place) if spec_of(root, place) else importlib.util.find_spec(root)):
        raise InvalidJobError(f"train={train!r}: there is no module {name!r} in the working directory or sys.path")
    return Program("module", name)


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
    """Raises InvalidJobError unless ranks can call the object with these arguments; False: further ones may follow."""
    if not callable(function):
        raise InvalidJobError(
            f"train is {function!r}; give a function, 'path/to/script.py', 'package.module:function', "
            "'-m package.module' or a list of words that are a command"
        )
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


def name_of(function: object) -> str:
    """Returns the display name of a function."""
    inner = getattr(function, "func", function)
    name = getattr(inner, "__name__", type(inner).__name__)
    return "lambda" if name == "<lambda>" else str(name)
