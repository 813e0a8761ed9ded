"""`Turn`: which thread of a rank carries out the next round."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Turn:
    """One at a time. Who waits for it also looks whether it still needs it. All methods need the mutex.

    Args:
        mutex: Of what the conditions look at.
    """

    def __init__(self, mutex: threading.Lock) -> None:
        self._changed = threading.Condition(mutex)
        self._is_taken = False
        self._sleepers = 0

    def take(self, is_needed: Callable[[], bool], may_begin: Callable[[], bool] | None = None) -> bool:
        """Waits for the turn, without the mutex.

        Args:
            is_needed: False if the caller can go on without it.
            may_begin: False if it is not needed yet; None: never.

        Returns:
            Whether it was taken; then `give` must follow.
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
        """Lets the next one have it, and those go on who needed it for what has been done."""
        self._is_taken = False
        self.wake()

    def wake(self) -> None:
        """Lets who waits look at its conditions again."""
        if self._sleepers:
            self._changed.notify_all()
