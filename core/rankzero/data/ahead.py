"""Reading ahead: a thread that produces the next items of an iterator while its consumer works."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_LOOK = 0.5
"""Seconds between two looks of a producer whether anybody still wants what it has."""

_END = object()


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

    threading.Thread(target=produce, name="rankzero-reader", daemon=True).start()
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
