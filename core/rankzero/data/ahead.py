"""Reading ahead: a thread that produces the next items of an iterator while its consumer works."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_LOOK = 0.5
"""Seconds between two looks of a producer whether anybody still wants what it has."""

_END_PATIENCE = 5.0
"""Seconds for which the end of a process waits for a piece that is being read."""

_END = object()

_threads: dict[threading.Thread, threading.Event] = {}
"""Those that run, and what stops each."""


@atexit.register
def _stop_all() -> None:
    """An interpreter that ends while a thread of it is in native code aborts."""
    for stopped in list(_threads.values()):
        stopped.set()
    for thread in list(_threads):
        thread.join(_END_PATIENCE)


def ahead(make: Callable[[], Iterator[T]], count: int) -> Iterator[T]:
    """The items of an iterator, up to ``count`` of which a thread has made before they are asked for.

    The thread ends with the items, or with this generator, however that ends.

    Args:
        make: Makes the iterator, in the thread.
        count: 0 for no thread.
    """
    if not count:
        yield from make()
        return
    items: queue.Queue[Any] = queue.Queue(count)
    stopped = threading.Event()

    def put(item: object) -> bool:
        while not stopped.is_set():
            try:
                items.put(item, timeout=_LOOK)
                return True
            except queue.Full:
                continue
        return False

    def produce() -> None:
        try:
            for item in make():
                if not put((item, None)):
                    return
            put((_END, None))
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
