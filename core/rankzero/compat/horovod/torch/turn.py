"""`Turn`: decides which thread of a rank runs the next round."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Turn:
    """A lock whose waiters also wake when they no longer need it. The caller of each method must hold the mutex.

    Args:
        mutex: Lock of the state that the conditions read.
    """

    def __init__(self, mutex: threading.Lock) -> None:
        self._changed = threading.Condition(mutex)
        self._is_taken = False
        self._sleepers = 0

    def take(self, is_needed: Callable[[], bool], may_begin: Callable[[], bool] | None = None) -> bool:
        """Waits for the turn, and releases the mutex meanwhile.

        Args:
            is_needed: Returns False if the caller no longer needs the turn.
            may_begin: Returns False if the caller does not need the turn yet; None: it always does.

        Returns:
            True if the turn was taken; then `give` must follow.
        """
        while is_needed():
            if not self._is_taken and (may_begin is None or may_begin()):
                self._is_taken = True
                return True
            self._sleepers += 1
            try:
                self._changed.wait()
            finally:
                self._sleepers -= 1
        return False

    def give(self) -> None:
        """Releases the turn, and wakes all waiters, some of which may no longer need it."""
        self._is_taken = False
        self.wake()

    def wake(self) -> None:
        """Makes all waiting threads check their conditions again."""
        if self._sleepers:
            self._changed.notify_all()
