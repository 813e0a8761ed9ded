"""Optional work of a pipeline step, such as a table of metrics: a failure of it is logged as a warning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rankzero.texts import encodable

T = TypeVar("T")


def attempt(log: Any, what: str, action: Callable[[], T], otherwise: T) -> T:
    """Returns the result of an action. If the action raises, logs a warning and returns ``otherwise``.

    Interrupts are not subclasses of `Exception`, and are raised again.

    Args:
        log: Logger of the pipeline step.
        what: The name of the action in the warning, such as "the table of reports".
        action: A function that reads or writes facts about a run whose result is stored.
        otherwise: The value to return if the action raises.
    """
    try:
        return action()
    except Exception as error:
        log.warning("%s", encodable(f"{what} is left out, which does not affect the training: {_describe(error)}"))
        return otherwise


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
