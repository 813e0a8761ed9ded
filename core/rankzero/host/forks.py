"""Forks of a rank that wait until no thread of rankzero is in an import or in a request to an object store.

A child has only the thread that forked. A lock that another thread held is never released in the child: the lock of a
module that was being imported, or of a client's library with a request in flight. The processes of a ``DataLoader`` are
such children, and they import modules and create clients.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator

from rankzero import bounds

FORK_TIMEOUT = bounds.scaled(30.0)  # For which a fork waits for imports and requests to a store of rankzero's threads

# Re-entrant, since a signal handler of the thread that has it may report, too. `with _lock`, and not `with _changed`: a
# handler's exception inside Condition.__enter__ leaves the lock held.
_lock = threading.RLock()
_changed = threading.Condition(_lock)
_holds: Counter[int] = Counter()
"""Number of `held` blocks that each thread is in, by the thread's identifier."""

_forking = 0
"""Number of threads that are about to fork."""

_is_unsafe = False


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Runs the block while no other thread forks: a fork waits for its end, at most `FORK_TIMEOUT` seconds."""
    thread = threading.get_ident()
    before = _holds[thread]
    try:
        _enter(thread, before + 1)
        yield
    finally:
        _leave(thread, before)


def pause(settle: Callable[[], object]) -> None:
    """Lets a fork that waits for this thread happen, in the middle of a `held` block.

    Args:
        settle: Ends what must not be in flight at a fork. It is called only if a fork waits.
    """
    thread = threading.get_ident()
    if _forking and (count := _holds[thread]):
        settle()
        _leave(thread, 0)
        _enter(thread, count)


def check() -> None:
    """Raises RuntimeError in a child whose fork did not wait long enough, where a new client would block."""
    if _is_unsafe:
        raise RuntimeError(
            f"process {os.getpid()} was forked while a request to an object store was in flight, which the fork "
            f"awaited for {FORK_TIMEOUT():g} s: its own requests would block. Fork later, or use no processes"
        )


def _enter(thread: int, count: int) -> None:
    with _lock:
        # A thread that a fork waits for, in an outer block, must not wait for the fork.
        _changed.wait_for(lambda: not _forking or _holds[thread])
        _holds[thread] = count


def _leave(thread: int, count: int) -> None:
    with _lock:
        _holds[thread] = count
        if not count:
            del _holds[thread]
        _changed.notify_all()


def _others() -> bool:
    return bool(_holds.keys() - {threading.get_ident()})


def _before() -> None:
    global _forking
    with _lock:
        _forking += 1
        _changed.wait_for(lambda: not _others(), FORK_TIMEOUT())


def _after_in_parent() -> None:
    global _forking
    with _lock:
        # CPython only prints the exception of a signal handler in `_before`.
        _forking = max(0, _forking - 1)
        _changed.notify_all()


def _after_in_child() -> None:
    global _lock, _changed, _forking, _is_unsafe
    _is_unsafe = _is_unsafe or _others()
    _lock, _forking = threading.RLock(), 0
    _changed = threading.Condition(_lock)
    for thread in _holds.keys() - {threading.get_ident()}:
        del _holds[thread]


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
