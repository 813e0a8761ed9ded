"""`progress`: shows how far a loop is, in a terminal and in a log."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rankzero import bounds
from rankzero.train.context import count_progress, get_context

PROGRESS_REDRAW_INTERVAL = 0.2  # Seconds between two updates of the progress line in a terminal

T = TypeVar("T")


def progress(iterable: Iterable[T], desc: str = "", total: int | None = None) -> Iterator[T]:
    """Yields the items of an iterable, and shows the count, the rate and the time left on rank 0.

    A terminal shows one line that changes; a log gets a line every five seconds. Each step counts as progress for
    ``hang_timeout``.

    Args:
        iterable: The items to iterate over.
        desc: Text at the beginning of the line.
        total: Number of items; None for ``len(iterable)`` if it has a length.

    Example:
        >>> import rankzero.train as rt
        >>> list(rt.progress(range(3), "epoch 1"))
        epoch 1: 3/3 (100%), ... it/s, 0:00 elapsed
        [0, 1, 2]
    """
    if total is None:
        # A loader of an endless data set has a length that raises.
        with contextlib.suppress(TypeError):
            total = len(iterable)  # type: ignore[arg-type]
    line = _Line(desc, total) if get_context().rank == 0 else None
    for count, item in enumerate(iterable, 1):
        yield item
        count_progress()
        if line:
            line.show(count)
    if line:
        line.end()


class _Line:
    def __init__(self, desc: str, total: int | None) -> None:
        self._desc = f"{desc}: " if desc else ""
        self._total = total
        self._started = time.monotonic()
        # A dumb terminal cannot clear a line.
        self._in_terminal = sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        self._interval = PROGRESS_REDRAW_INTERVAL if self._in_terminal else bounds.PROGRESS_LINE_INTERVAL()
        self._count = 0
        self._shown = (0, self._started)

    def show(self, count: int) -> None:
        self._count = count
        if time.monotonic() - self._shown[1] >= self._interval:
            self._write("\r" if self._in_terminal else "\n")

    def end(self) -> None:
        self._write("\n")

    def _write(self, end: str) -> None:
        now = time.monotonic()
        clear = "\x1b[2K" if self._in_terminal else ""
        sys.stdout.write(f"{clear}{self._desc}{self._state(now)}{end}")
        sys.stdout.flush()
        self._shown = (self._count, now)

    def _state(self, now: float) -> str:
        passed = now - self._started
        rate = self._count / passed if passed else 0.0
        speed = f"{rate:.1f} it/s" if rate >= 1 or not rate else f"{1 / rate:.1f} s/it"
        if not self._total:
            return f"{self._count}, {speed}, {_clock(passed)} elapsed"
        share = f"{self._count}/{self._total} ({self._count / self._total:.0%})"
        if self._count < self._total and rate:
            return f"{share}, {speed}, {_clock((self._total - self._count) / rate)} left"
        return f"{share}, {speed}, {_clock(passed)} elapsed"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
