"""Resolves ``train`` to a function, a script, a module or a command, checks it, and names its arguments."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from rankzero.errors import InvalidJobError
from rankzero.masking import MASK, Mask, hides, secrets_of, without_credentials
from rankzero.submit import code

MODULE = "-m "  # Prefix of a `train` that names a module to run, as for `python` and `torchrun`
MAX_TEXT = 500  # Characters to which a value is cut that is shown
_BITS = 1024  # Most bits of an integer that is shown: more digits than Python writes would fail the submission


class Program(NamedTuple):
    """A script, a module or a command, which ranks run in place of a function."""

    kind: str  # "script" for a Python file, "module" as for `python -m`, "command" as for torchrun's --no-python
    target: str  # Absolute path of the script, name of the module, or the program
    line: tuple[str, ...] = ()  # The first words of the command line, of which the first is a command's program
    source: bytes = b""  # The text of a script
    needs: code.Source = code.Source()  # The names of the modules that a script or module needs
    first: str | None = None  # The directory that is searched before `sys.path` for them

    @property
    def name(self) -> str:
        """Returns the name that people see."""
        return self.target if self.kind == "module" else os.path.basename(self.target)


def resolve(train: object) -> Any:
    """Resolves ``train`` to a `Program`, or to the object that ranks call.

    It is a callable, ``"path/to/script.py"``, a path object, ``"package.module:function"``, ``"-m package.module"``, or
    a list of words, which are a command. Raises InvalidJobError if there is no such thing.
    """
    code.forget_places()
    if isinstance(train, (list, tuple)):
        if not train or not all(isinstance(word, (str, os.PathLike)) for word in train):
            raise InvalidJobError(f"train is {train!r}; a command is a list of strings, such as ['bash', 'train.sh']")
        line = tuple(os.fspath(word) for word in train)
        return Program("command", line[0], line)
    if isinstance(train, str) and train.startswith(MODULE):
        name, here = train.removeprefix(MODULE).strip(), os.getcwd()
        if not all(part.isidentifier() for part in name.split(".")):
            raise InvalidJobError(f"train={train!r} names no module: write '-m package.module', its arguments apart")
        root = name.partition(".")[0]
        if not (code.spec_of(root, here) or importlib.util.find_spec(root)):
            raise InvalidJobError(f"train={train!r}: there is no module {root!r} in the working directory or sys.path")
        # A package is run by its module `__main__`.
        return Program("module", name, needs=code.Source(imports=frozenset({name, f"{name}.__main__"})), first=here)
    is_reference = isinstance(train, str) and ":" in train and os.sep not in train and not train.endswith(".py")
    if isinstance(train, (str, os.PathLike)) and not is_reference:
        path = os.path.abspath(os.path.expanduser(os.fspath(train)))
        if not os.path.isfile(path):
            raise InvalidJobError(f"train={train!r}: there is no such script (looked at {path})", code="RZ-1005")
        with open(path, "rb") as file:
            source = file.read()
        try:
            code.to_code(source, path)
        except (SyntaxError, ValueError) as error:
            raise InvalidJobError(f"train={path!r} is not Python: {error}") from None
        return Program("script", path, (), source, code.source_of_file(path), os.path.dirname(path))
    found: Any = _function(train) if isinstance(train, str) else train
    named: Any = code.named_like(found, found.__module__) if code.is_distributed(found) else None
    if code.is_distributed(named) and named.launch_function is found.launch_function:
        # Of `train.options(...)`, ranks import `train`.
        found = named
    # In ranks, what `rankzero.distributed` has made of a function is the plain function.
    return found.launch_function if code.is_distributed(found) and not code.is_importable(found) else found


def _function(reference: str) -> object:
    module, _, attributes = reference.partition(":")
    try:
        return functools.reduce(getattr, attributes.split("."), importlib.import_module(module))
    except Exception as error:
        what = f"train={reference!r} cannot be imported: {type(error).__name__}: {error}"
        raise InvalidJobError(what, code="RZ-1006") from error


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
        what = f"the arguments do not fit {name_of(function)}{signature}: {error}"
        raise InvalidJobError(what, code="RZ-1003") from None


def name_of(function: object) -> str:
    """Returns the display name of a function."""
    inner = getattr(function, "func", function)
    name = getattr(inner, "__name__", type(inner).__name__)
    return "lambda" if name == "<lambda>" else str(name)


# -- arguments by name --------------------------------------------------------------------------


def params_of(
    training: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], env: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the arguments of a call by name, with defaults: plain values, and the names of the types of others.

    A command line is one text, ``args``. Secrets are masked by their names, also those of the ranks' variables,
    wherever else they occur, and in URLs.
    """
    named = bind(training, args, kwargs, all_of=True)
    words: list[str] = []
    secrets = [secret for group in (env, named) for secret in secrets_of(group)]
    # Of a dict, too, which is shown as its type: another argument may have a part of it.
    secrets += [secret for value in named.values() if isinstance(value, dict) for secret in secrets_of(value)]
    if isinstance(training, Program):
        for before, word in itertools.pairwise(["", *training.line, *map(str, args)]):
            # ``--name=value`` and ``name=value``, or the value behind ``--name``, which may have a "=", too.
            is_flag = word.startswith("--") and word[2:3].isalpha()
            flag = before if before.startswith("-") and "=" not in before and not is_flag else ""
            name, equals, value = word.partition("=")
            if not equals or hides(flag.lstrip("-+~"), word):
                name, equals, value = flag, "", word
            secrets += secrets_of({name.lstrip("-+~"): value})
            words.append(f"{name if equals else ''}{equals}{MASK}" if hides(name.lstrip("-+~"), value) else word)
        named = {"args": " ".join(words)}
    mask = Mask(secrets)
    return {name: _shown(name, value, mask) for name, value in named.items()}


def bind(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, all_of: bool = False) -> dict[str, Any]:
    """Returns the arguments of a call by name, and the defaults of others; of a command line or in C as a whole."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        # Some functions written in C have no signature.
        return {"args": args, "kwargs": dict(kwargs)}
    if all_of:
        bound.apply_defaults()
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            # The name of a positional-only parameter may also be that of an option.
            named |= {f"{name}.{key}" if key in named else key: each for key, each in value.items()}
        else:
            named[name] = value
    return named


def _shown(name: str, value: Any, mask: Mask) -> Any:
    if isinstance(value, int) and value.bit_length() > _BITS:
        return type(value).__name__
    if hides(name, value):
        return MASK
    if isinstance(value, str):
        return without_credentials(mask.text(value))[:MAX_TEXT]
    return value if value is None or isinstance(value, (int, float)) else type(value).__name__
