"""Retries an access to a store that fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from rankzero.errors import RunNotFoundError

T = TypeVar("T")


def is_missing(error: Exception) -> bool:
    """Returns True for the error of a file or run that does not exist, which no retry corrects."""
    return isinstance(error, (FileNotFoundError, RunNotFoundError))


def patiently(
    action: Callable[[], T], seconds: float, interval: float, give_up: Callable[[Exception], bool] = lambda _: False
) -> T:
    """Returns the result of ``action``, which is retried while the store fails: a short outage must not end a run.

    Args:
        action: Function that reads or writes the store.
        seconds: Seconds during which a failure is retried.
        interval: Seconds between two calls.
        give_up: Returns True for an error that should not be retried.

    Raises:
        Exception: the last error, of any type, since drivers of object stores raise their own exceptions.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return action()
        except Exception as error:
            if give_up(error) or time.monotonic() > deadline:
                raise
        time.sleep(interval)
