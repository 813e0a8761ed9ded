"""Deals with a store that fails for a while, or that does not answer: retries, waits with a limit, and one line."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from rankzero.errors import RunNotFoundError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

SILENCE = 10.0
"""Seconds without an answer after which a process logs that a store does not answer."""

_silent: set[str] = set()
"""Stores of which this process has logged that they do not answer, until they do."""

_requests: dict[int, tuple[float, str]] = {}
"""The brief request that each thread waits for: since when, and its location."""

os.register_at_fork(after_in_child=_requests.clear)
_watcher = threading.Thread()


def brief(request: Callable[P, T]) -> Callable[P, T]:
    """Marks a function as a request that a store answers quickly; one line is logged if it does not.

    Most files of a disk are read faster than a thread starts, so one thread watches the requests while there are any.
    """

    @functools.wraps(request)
    def watched(*args: P.args, **options: P.kwargs) -> T:
        global _watcher
        thread, location = threading.get_ident(), str(args[0])
        if thread in _requests:
            return request(*args, **options)
        _requests[thread] = (time.monotonic(), location)
        try:
            if not _watcher.is_alive():
                _watcher = threading.Thread(target=_watch, name="rankzero-store", daemon=True)
                # At the end of the process no thread can be started.
                with contextlib.suppress(RuntimeError):
                    _watcher.start()
            answer = request(*args, **options)
            if _silent:
                _silent.discard(_store_of(location))
            return answer
        finally:
            _requests.pop(thread, None)

    return watched


def _store_of(location: str) -> str:
    return "/".join(location.split("/", 3)[:3]) if "://" in location else location


def _watch() -> None:
    while _requests:
        time.sleep(SILENCE / 4)
        for began, location in [*_requests.values()]:
            if time.monotonic() - began >= SILENCE and (store := _store_of(location)) not in _silent:
                _silent.add(store)
                what = "does not answer: a request has waited for %g s, and waits on; check it and the network"
                logger.warning(f"the store %s {what}", store, SILENCE)


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
