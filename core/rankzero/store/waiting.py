"""Deals with a store that fails for a while, or that does not answer: retries, waits with a limit, and one line."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from rankzero.errors import RunNotFoundError

logger = logging.getLogger(__name__)

T = TypeVar("T")

SILENCE = 10.0
"""Seconds without an answer after which a process logs that a store does not answer."""

_BRIEF = frozenset({"cat_file", "exists", "ls", "modified", "pipe_file", "size"})
"""Requests of fsspec's file systems that a store answers quickly; an upload may take as long as it needs."""

_silent: set[str] = set()
"""Stores of which this process has logged that they do not answer, until they do."""


@dataclass(frozen=True)
class Watched:
    """A file system of fsspec, of whose store one line is logged if it does not answer a brief request."""

    filesystem: Any
    store: str

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.filesystem, name)
        return functools.partial(self._request, found) if name in _BRIEF else found

    def _request(self, request: Callable[..., Any], *args: Any, **options: Any) -> Any:
        timer = threading.Timer(SILENCE, self._log)
        timer.daemon = True
        # At the end of the process no thread can be started.
        with contextlib.suppress(RuntimeError):
            timer.start()
        try:
            answer = request(*args, **options)
            _silent.discard(self.store)
            return answer
        finally:
            timer.cancel()

    def _log(self) -> None:
        if self.store not in _silent:
            _silent.add(self.store)
            what = "does not answer: a request has waited for %g s, and waits on; check its address and the network"
            logger.warning(f"the store %s {what}", self.store, SILENCE)


def in_thread(action: Callable[[], T]) -> Future[T]:
    """Calls a function of the store in a daemon thread, so that its caller can wait with a limit.

    Returns:
        The future result. A store that hangs never completes it, and does not keep the process alive.
    """
    future: Future[T] = Future()

    def act() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    try:
        threading.Thread(target=act, name="rankzero-store", daemon=True).start()
    except RuntimeError:
        # At the limit of threads, or at the end of the process: the caller waits without a limit.
        act()
    return future


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
