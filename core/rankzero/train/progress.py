"""`progress`: shows how far a loop is."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TypeVar

from rankzero import bounds
from rankzero.train.context import count_progress, get_context

PROGRESS_LINE_INTERVAL = bounds.scaled(5.0)  # Between two progress lines in a log
T = TypeVar("T")


def progress(iterable: Iterable[T], desc: str = "", total: int | None = None) -> Iterator[T]:
    """Yields the items of an iterable, and shows the count, the rate and the time left on rank 0.

    It prints a line every five seconds. Each step counts as progress for ``hang_timeout``.

    Args:
        iterable: The items to iterate over.
        desc: Text at the beginning of the line.
        total: Number of items; None for ``len(iterable)`` if it has a length.

    Example:
        >>> import rankzero.train as rt
        >>> list(rt.progress(range(3), "epoch 1"))
        epoch 1: 3/3 (100%), ... it/s, 0:00:00 elapsed
        [0, 1, 2]
    """
    if total is None:
        # A loader of an endless data set has a length that raises.
        with contextlib.suppress(TypeError):
            total = len(iterable)  # type: ignore[arg-type]
    is_shown = get_context().rank == 0
    begin = shown = time.monotonic()
    count = 0
    for count, item in enumerate(iterable, 1):
        yield item
        count_progress()
        if is_shown and time.monotonic() - shown >= PROGRESS_LINE_INTERVAL():
            shown = time.monotonic()
            print(_line(desc, count, total, shown - begin), flush=True)
    if is_shown:
        print(_line(desc, count, total, time.monotonic() - begin), flush=True)


def _line(desc: str, count: int, total: int | None, passed: float) -> str:
    rate = count / passed if passed else 0.0
    speed = f"{rate:.1f} it/s" if rate >= 1 or not rate else f"{1 / rate:.1f} s/it"
    name = f"{desc}: " if desc else ""
    share = f"/{total} ({count / total:.0%})" if total else ""
    is_running = total is not None and rate and count < total
    seconds = (total - count) / rate if is_running else passed  # type: ignore[operator]
    return f"{name}{count}{share}, {speed}, {timedelta(seconds=round(seconds))} {'left' if is_running else 'elapsed'}"
