"""Bookkeeping about a training that has succeeded: its failure is one line in the log, never the task's failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rankzero.texts import encodable

T = TypeVar("T")


def attempt(log: Any, what: str, action: Callable[[], T], otherwise: T) -> T:
    """Returns what an action returns; if it raises, logs one warning and returns ``otherwise``.

    Interrupts, which are no `Exception`, pass through.

    Args:
        log: The step's logger.
        what: Names the action in the warning, as in "the table of reports".
        action: Reads or writes facts about a run whose result is stored.
        otherwise: The value to go on with.
    """
    try:
        return action()
    except Exception as error:
        log.warning("%s", encodable(f"{what} is left out, and the training's result is delivered: {_describe(error)}"))
        return otherwise


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
