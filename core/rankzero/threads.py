"""Daemon threads for calls that may never return, such as one into a JVM that was stopped or a store that hangs.

The default executor of asyncio is not used for them: the interpreter joins its threads when it exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

AT_ONCE = 0.005  # Seconds in which most threads reply; for that long a loop stands still, since its detour takes longer

T = TypeVar("T")


class ActionThread:
    """Runs actions one after the other in one daemon thread. For engines, py4j opens a connection for each thread."""

    def __init__(self, name: str = "rankzero-engine") -> None:
        self._actions: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def submit(self, action: Callable[[], T]) -> Future[T]:
        """Queues an action; the future gets its result or its exception."""
        future: Future[T] = Future()
        self._actions.put((future, action))
        if not self._thread.ident:
            try:
                self._thread.start()
            except RuntimeError:
                # At the limit of threads, or at the end of the process: the caller waits without a limit.
                self._actions.put(None)
                self._work()
        return future

    def end(self, timeout: float = 0.0) -> None:
        """Ends the thread after the last action, for which it waits ``timeout`` seconds at most."""
        if self._thread.ident:
            self._actions.put(None)
            self._thread.join(timeout)

    def _work(self) -> None:
        while item := self._actions.get():
            future, action = item
            try:
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)
            # Until the next action, this thread keeps no result in memory.
            del item, future, action


def in_thread(action: Callable[[], T], name: str = "rankzero-engine") -> Future[T]:
    """Calls a function in a daemon thread, so that its caller can wait with a limit."""
    own = ActionThread(name)
    future = own.submit(action)
    own.end()
    return future


async def reply_of(future: Future[T], seconds: float | None = None, *, at_once: float = AT_ONCE) -> T:
    """Returns the result of a thread to a coroutine, or raises its exception.

    The loop stands still for ``at_once`` seconds at most: 0 for what is called often and may take longer.
    Raises TimeoutError if the thread has not finished within ``seconds``; it continues, as after a cancellation.
    """
    with contextlib.suppress(TimeoutError):
        return future.result(at_once)
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def wake(_: object) -> None:
        # The loop may be closed by then.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(wake)
    async with asyncio.timeout(seconds):
        await done.wait()
    return future.result()


async def done_within(seconds: float, action: Callable[[], object], thread: ActionThread | None = None) -> bool:
    """Runs an engine's action in a thread, if None a new one, for limited time; returns False if it took longer.

    An exception of the action is only logged.
    """
    future = thread.submit(action) if thread else in_thread(action)
    try:
        await reply_of(future, seconds)
    except Exception as error:
        if not future.done():
            logger.warning("the engine did not answer within %s s", seconds)
            return False
        logger.warning("the engine failed", exc_info=error)
    return True
