"""Trying again while a store fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def patiently(
    action: Callable[[], T], seconds: float, interval: float, give_up: Callable[[Exception], bool] = lambda _: False
) -> T:
    """What ``action`` returns, tried again while the store fails: an outage of a moment must not end a run.

    Args:
        action: What reads or writes the store.
        seconds: For so long a failure is followed by another try.
        interval: Seconds between two tries.
        give_up: True for an error after which another try is of no use.

    Raises:
        Exception: the last error, of any type: drivers of object stores have exceptions of their own.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return action()
        except Exception as error:
            if give_up(error) or time.monotonic() > deadline:
                raise
        threading.Event().wait(interval)
