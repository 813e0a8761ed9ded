"""Reading ahead: a thread that produces the next items of an iterator while its consumer works."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from rankzero import bounds
from rankzero.host import forks

T = TypeVar("T")

_END = object()

_threads: dict[threading.Thread, threading.Event] = {}
"""The running threads, each with the event that stops it."""


@atexit.register
def _stop_all() -> None:
    """Stops all threads, since an interpreter aborts if it exits while one of its threads runs native code."""
    for stopped in list(_threads.values()):
        stopped.set()
    for thread in list(_threads):
        thread.join(bounds.READ_AHEAD_EXIT_TIMEOUT)


def ahead(make: Callable[[], Iterator[T]], count: int) -> Iterator[T]:
    """Yields the items of an iterator, up to ``count`` of which a thread produces in advance.

    The thread ends after the last item, or when this generator is closed.

    Args:
        make: Creates the iterator, in the thread.
        count: Most items that are produced in advance; 0 for no thread.
    """
    if not count:
        yield from make()
        return
    items: queue.Queue[Any] = queue.Queue(count)
    stopped = threading.Event()

    def put(item: object) -> bool:
        while not stopped.is_set():
            try:
                items.put(item, timeout=bounds.POLL_INTERVAL_LONG)
                return True
            except queue.Full:
                continue
        return False

    def produce() -> None:
        try:
            iterator, item = make(), None
            while item is not _END:
                with forks.held():
                    item = next(iterator, _END)
                if not put((item, None)):
                    return
        except BaseException as error:
            put((_END, error))
        finally:
            _threads.pop(threading.current_thread(), None)

    thread = threading.Thread(target=produce, name="rankzero-reader", daemon=True)
    _threads[thread] = stopped
    thread.start()
    try:
        while True:
            item, error = items.get()
            if error is not None:
                raise error
            if item is _END:
                return
            yield item
    finally:
        stopped.set()
