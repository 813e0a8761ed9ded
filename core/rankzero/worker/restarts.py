"""Matches the exception that ended a rank with ``restart_on``, the failures after which the user wants a restart."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from rankzero.job import qualified_name

RestartOn = Callable[[BaseException], Any] | Sequence[str | type[BaseException]]

_pickled: bytes | None = None


def install(pickled: bytes | None) -> None:
    """Stores the job's pickled ``restart_on``, which is loaded only if this rank fails."""
    global _pickled
    _pickled = pickled


def what_matches(error: BaseException, text: str) -> str | None:
    """Returns the name of the entry of the job's ``restart_on`` that matches an exception; None if none does.

    Args:
        error: The exception of the user's code.
        text: Its type and message, as shown to the user.
    """
    if _pickled is None:
        return None
    try:
        return match(pickle.loads(_pickled), error, text)
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
