"""Whether the exception that ended a rank is one after which the user wants another attempt (``restart_on``)."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from rankzero.job import qualified_name

RestartOn = Callable[[BaseException], Any] | Sequence[str | type[BaseException]]

_pickled: bytes | None = None


def install(pickled: bytes | None) -> None:
    """Keeps the job's ``restart_on`` for the moment in which this rank fails; until then nothing of it is loaded."""
    global _pickled
    _pickled = pickled


def what_matches(error: BaseException, text: str) -> str | None:
    """What of the job's ``restart_on`` an exception is; None if nothing.

    Args:
        error: Of the user's code.
        text: Its type and message, as they are shown.
    """
    if _pickled is None:
        return None
    try:
        return match(pickle.loads(_pickled), error, text)
    except BaseException:
        # The exception of the training is what counts.
        print("rankzero: restart_on could not be asked, so this failure is not matched:")
        traceback.print_exc()
        return None


def match(restart_on: RestartOn, error: BaseException, text: str) -> str | None:
    """The text, class or function that matches, by its name; None if none does.

    Args:
        restart_on: A function of the exception; or texts and classes. A text matches where it is a part of ``text``,
            or the qualified name of a class of the exception.
        error: The exception.
        text: Its type and message, as they are shown.
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
