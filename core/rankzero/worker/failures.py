"""Describes the exception that ended a rank by facts, which are sent to the caller instead of the object.

One of them is the entry of ``restart_on``, the failures after which the user wants a restart, that matches it. No
function that describes may raise, although the exception's ``__str__`` is user code and may.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from rankzero.channel.messages import Failed
from rankzero.errors import RetryableError, advised, encodable
from rankzero.job import qualified_name

MESSAGE_LIMIT = 16 << 10  # Most characters of an exception's text that are sent

TRACEBACK_LIMIT = 64 << 10  # Most characters of a traceback that are sent, from its end

_FAILED = 1
_SIGNS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL")
_BROKEN_LINE = re.compile(
    rf"^\W*(torch\.distributed\.Dist\w*Error\b|RuntimeError: .*({'|'.join(_SIGNS)}))", re.MULTILINE
)
"""A line of a traceback that shows a broken collective."""
_ROOM = os.path.dirname(__file__)
_OWN_FRAME = re.compile(r'  File "(?:.*rankzero/(?:agent|host|task|worker)/\w+\.py|<string>)", line \d+ in ')

RestartOn = Callable[[BaseException], Any] | Sequence[str | type[BaseException]]

_restart_on: bytes | None = None


class CommandError(Exception):
    """Raised when the command of a rank fails.

    Attributes:
        facts: Fields of the failure message: exception, exit code, signal.
    """

    def __init__(self, message: str, facts: dict[str, Any]) -> None:
        super().__init__(message)
        self.facts = {"exception_type": None, "message": message, "traceback": None, **facts}


def describe(error: BaseException) -> Failed:
    """Returns the failure message of a rank for its agent and the driver, in text that every log accepts."""
    facts = _facts_of(error)
    for name, fact in facts.items():
        facts[name] = encodable(fact) if isinstance(fact, str) else fact
    return Failed(time.time(), **facts)


def _facts_of(error: BaseException) -> dict[str, Any]:
    if isinstance(error, CommandError):
        # The command's own error, and the exception of a Python program if it was recorded.
        name, text = error.facts["exception_type"] or "", error.facts["message"]
        matched = what_matches(error, f"{error}\n{name}: {text}")
        recorded, message = error.facts["traceback"], advised(text, f"{name}: {text}")
        collateral = bool(recorded and _BROKEN_LINE.search(recorded))
        return {**error.facts, "message": message, "matched": matched, "collateral": collateral}
    name, text = qualified_name(type(error)), _text_of(error)
    exit_code = _FAILED
    if isinstance(error, SystemExit):
        exit_code = error.code if isinstance(error.code, int) else _FAILED
    return {
        "exception_type": name,
        "message": advised(text, f"{name}: {text}"),
        "traceback": _user_traceback(error),
        "exit_code": exit_code & 0xFF or _FAILED,
        "collateral": any(_is_broken_collective(one) for one in _chain(error)),
        "retryable": isinstance(error, RetryableError),
        "matched": what_matches(error, f"{name}: {text}"),
    }


def no_torch(error: ImportError) -> Failed:
    """Returns the failure message of a rank whose Python has no torch."""
    version = ".".join(map(str, sys.version_info[:3]))
    message = (
        f"torch cannot be imported by {sys.executable} (Python {version}) on "
        f"{socket.gethostname()}: {error}. Install torch there, or point spark.pyspark.python to a "
        "Python that has it"
    )
    return dataclasses.replace(describe(error), message=encodable(message), cause="no-torch")


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:MESSAGE_LIMIT]
    except BaseException as broken:
        return f"(its text cannot be had: {type(broken).__name__})"


def _user_traceback(error: BaseException) -> str:
    frame = error.__traceback__
    while frame and frame.tb_next and os.path.dirname(frame.tb_frame.f_code.co_filename) == _ROOM:
        frame = frame.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, frame))
    except BaseException:
        # An attribute of the exception, or of one in its chain, raises.
        text = "".join(["Traceback (most recent call last):\n", *traceback.format_tb(frame), _text_of(error)])
    return text[-TRACEBACK_LIMIT:]


def _chain(error: BaseException) -> list[BaseException]:
    """Returns an exception and all that it was raised from or while handling, and the members of groups."""
    found: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or any(one is known for known in found):
            continue
        found.append(one)
        waiting += [one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())]
    return found


def _is_broken_collective(error: BaseException) -> bool:
    """Returns True for the error of a collective, which may have broken because another rank has vanished."""
    broken = getattr(sys.modules.get("torch.distributed"), "DistError", None)
    if broken and isinstance(error, broken):
        return True
    return isinstance(error, RuntimeError) and any(sign in _text_of(error) for sign in _SIGNS)


def install_restart_on(pickled: bytes | None) -> None:
    """Stores the job's pickled ``restart_on``, which is loaded only if this rank fails."""
    global _restart_on
    _restart_on = pickled


def what_matches(error: BaseException, text: str) -> str | None:
    """Returns the name of the entry of the job's ``restart_on`` that matches an exception; None if none does."""
    if _restart_on is None:
        return None
    try:
        return match(pickle.loads(_restart_on), error, text)
    except BaseException:
        # The exception of the training is the one to report.
        print("rankzero: restart_on raised an exception, so this failure is not matched:")
        traceback.print_exc()
        return None


def match(restart_on: RestartOn, error: BaseException, text: str) -> str | None:
    """Returns the name of the text, class or function that matches an exception; None if none does.

    Args:
        restart_on: A function of the exception; or texts and classes. A text matches if it is a part of ``text``, or
            the qualified name of a class of the exception.
        error: The exception.
        text: Its type and message, as shown to the user.
    """
    if callable(restart_on):
        return getattr(restart_on, "__name__", repr(restart_on)) if restart_on(error) else None
    names = {qualified_name(cls) for cls in type(error).__mro__}
    for wanted in restart_on:
        if isinstance(wanted, str):
            if wanted in text or wanted in names:
                return wanted
        elif isinstance(error, wanted):
            return qualified_name(wanted)
    return None


def is_own_frame(line: str) -> bool:
    """Returns True for a line of faulthandler's output that shows a frame of rankzero, below the user's code."""
    return bool(_OWN_FRAME.match(line))
