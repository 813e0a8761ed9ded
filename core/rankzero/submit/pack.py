"""Packs a function or script, its arguments and the user's modules that they need, and names the training by them.

All that is sent counts. The user's own modules (all that are not installed) need not exist where the ranks run:

* a module that can be imported by its name is sent as files, in ``modules.zip``, with its whole package and those that
  this imports in turn; its functions and classes are pickled by reference, so that each exists once;
* ``__main__``, notebooks, DAG files under synthetic names, and modules that import an orchestrator, which executors do
  not have, are pickled by value, as far as the function refers to them.

Inodes, times, retries, the location of a value, comments and the layout of sources do not count.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import logging
import os
import re
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rankzero.engines.base import Engine
from rankzero.errors import InvalidJobError
from rankzero.kinds import NumProcesses
from rankzero.run.identity import (
    ARGUMENT,
    CODE_VERSION,
    DIGITS,
    MODULE,
    NUM_PROCESSES,
    RESISTS,
    SENT_CODE,
    TRAIN,
)
from rankzero.submit.code_files import Modules, Needs, UserCode
from rankzero.submit.code_source import digest_of_source
from rankzero.submit.pack_content import Contents
from rankzero.submit.pack_pickler import TrainingPickler
from rankzero.submit.training import Program, bind, check_callable, name_of, resolve
from rankzero.tracking.tracker import Tracker
from rankzero.values.pickled import Part, beside, pack
from rankzero.values.ref import ResultRef, map_refs

logger = logging.getLogger(__name__)

_TEXT = re.compile(rb"\x8c(.)([A-Za-z_]\w*(?:[.:]\w+)*)", re.DOTALL)
"""A short text in a pickle that may name something in a module, behind its length. One word rarely does."""


@dataclass(frozen=True)
class Payload:
    """The function or script, arguments and modules that are sent to the workers.

    Attributes:
        name: Display name of the function or script.
        data: The pickle of function or script and arguments, made by `rankzero.values.pickled.pack`.
        modules: The user modules that are shipped with it.
        refs: The `ResultRef` objects among the arguments and in a trainer's configuration.
        training: What `rankzero.submit.training.resolve` has made of the function or script.
        arguments: The arguments with their names.
    """

    name: str
    data: list[Part]
    modules: Modules
    refs: list[ResultRef]
    training: Any
    arguments: dict[str, Any]

    def identity(
        self, world_size: NumProcesses, code_version: str | None = None, user_code: UserCode | None = None
    ) -> dict[str, str]:
        """Returns the checksums of the training's parts by name; ``code_version`` replaces those of its code."""
        contents = Contents()
        parts = {NUM_PROCESSES: repr(world_size)}
        for name, value in self.arguments.items():
            make = functools.partial(contents.digest_of, value)
            parts[f"{ARGUMENT}{name}"] = _compared(f"the argument {name}", make)
        if code_version is not None:
            return parts | {CODE_VERSION: _short(repr(code_version))}
        if user_code and user_code.sent:
            parts[SENT_CODE] = user_code.sent[0][:DIGITS]
        parts[TRAIN] = _compared("the function", lambda: _short(f"{self._own(contents)} {contents.code()}"))
        return parts | {f"{MODULE}{name}": digest[:DIGITS] for name, digest in self.modules.counted.items()}

    def _own(self, contents: Contents) -> str:
        """Returns what counts as the function or program itself."""
        train = self.training
        if not isinstance(train, Program):
            return contents.digest_of(train)
        return (
            digest_of_source(train.source()) if train.kind == "script" else repr((train.kind, train.target, train.line))
        )


def _short(text: str) -> str:
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:DIGITS]


def _compared(what: str, digest: Callable[[], str]) -> str:
    """Returns a checksum; of what has none, since its class may do anything while it is pickled, another each time."""
    try:
        return digest()[:DIGITS]
    except Exception as error:
        logger.warning(
            "%s cannot be compared with that of another try, and counts as unchanged if an orchestrator tries again by "
            "itself, else as changed: %s: %s",
            what,
            type(error).__name__,
            (str(error).splitlines() or [""])[0],
        )
        return RESISTS + secrets.token_hex(DIGITS // 2)


def build(
    train: object, args: tuple[Any, ...], kwargs: dict[str, Any], restart_on: object = (), *, is_alone: bool = False
) -> Payload:
    """Builds the payload of a training.

    Args:
        train: As for `rankzero.submit.training.resolve`. The ``launch_config`` of a compatibility layer's trainer is a
            dict that counts as an argument: `ResultRef` objects in it are opened, too.
        args: Positional arguments. `ResultRef` objects in them, also nested, are opened in the workers.
        kwargs: Keyword arguments; only a function accepts them.
        restart_on: As for `Launcher`; a rank that fails loads it.
        is_alone: True for a run of one rank, whose objects may depend on a world of one process.

    Raises:
        InvalidJobError: ``train`` cannot be run, the arguments do not fit its signature,
            or an object cannot be pickled; the message names it.
    """
    refs: list[ResultRef] = []
    map_refs([list(args), dict(kwargs), getattr(train, "launch_config", None)], refs.append)
    training = resolve(train)
    if is_program := isinstance(training, Program):
        name, needs, parts = training.name, training.needs(), _parts_of_program(training, args, kwargs)
    else:
        check_callable(training, args, kwargs)
        name, needs = name_of(training), Needs()
        parts = {"kind": "function", "name": name, "function": training, "args": args, "kwargs": kwargs}
    arguments = bind(training, args, kwargs)
    buffers: list[memoryview] = []
    pickler, other = TrainingPickler(beside(buffers), is_alone=is_alone), TrainingPickler()
    if restart_on:
        try:
            parts["restart_on"] = other.dumps(restart_on)
        except Exception as error:
            raise InvalidJobError(f"restart_on={restart_on!r} cannot be pickled: {error}") from error
    try:
        # Pickled last, when it is complete.
        pickled = pickler.dumps(parts if is_program else parts | {"loaded": pickler.loaded})
    except Exception as error:
        culprit = _find_culprit(name, arguments, is_alone)
        raise InvalidJobError(f"{culprit} cannot be pickled: {error}", code="RZ-1004") from error
    needs = needs if is_program else pickler.needs
    texts = {text.decode().replace(":", ".") for length, text in _TEXT.findall(pickled) if length[0] == len(text)}
    texts = {text for text in texts if needs.computes or "." in text}
    needs.texts |= texts - pickler.by_value | other.needs.texts
    needs.modules |= other.needs.modules
    return Payload(name, pack(pickled, buffers), Modules(needs), refs, training, arguments)


def _parts_of_program(program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the payload of a program, which takes a command line."""
    if kwargs:
        raise InvalidJobError(
            f"a {program.kind} takes positional arguments only, not {', '.join(sorted(kwargs))}: "
            f"write '--{next(iter(kwargs))}', value"
        )
    line = tuple(value if isinstance(value, ResultRef) else str(value) for value in args)
    return {**program.parts(), "args": (*program.line, *line)}


def _find_culprit(name: str, arguments: dict[str, Any], is_alone: bool) -> str:
    """Returns the name of the argument or function that cannot be pickled."""
    for argument, value in arguments.items():
        try:
            TrainingPickler(is_alone=is_alone).dumps(value)
        except Exception:
            return f"argument {argument!r} (a {type(value).__name__})"
    return f"train={name}, or something it refers to,"


def pack_trackers(trackers: Sequence[Tracker], engine: Engine) -> dict[str, Any] | None:
    """Packs the trackers' pickles and the search path for their modules as JSON for the driver; None without trackers.

    Raises:
        InvalidJobError: a tracker cannot be pickled, or cannot work on this machine, where the driver will run.
    """
    pickles = []
    for tracker in trackers:
        if not engine.drives_elsewhere:
            tracker.check()
        try:
            pickles.append(base64.b64encode(TrainingPickler().dumps(tracker)).decode())
        except Exception as error:
            raise InvalidJobError(
                f"trackers has {type(tracker).__name__}, which cannot be pickled: {error}; make clients in begin()"
            ) from error
    path = [] if engine.drives_elsewhere else [os.path.abspath(entry) for entry in sys.path]
    return {"pickles": pickles, "path": path} if pickles else None
