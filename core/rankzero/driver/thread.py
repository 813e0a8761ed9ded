"""`DriverThread`: a driver in the caller's process."""

from __future__ import annotations

import os
import threading

from rankzero.driver.driver import Driver


class DriverThread(threading.Thread):
    """A driver in a thread of the caller's process. ``error`` is what `Driver.run` raised."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(name="rankzero-driver", daemon=True)
        self.driver = driver
        self.error: BaseException | None = None
        # Not join() with a timeout, nor is_alive(): before CPython 3.13 an exception of a signal handler inside of
        # join() makes a thread that runs look ended.
        self._ended = threading.Event()

    def run(self) -> None:
        """Runs the driver."""
        try:
            self.driver.run()
        except BaseException as error:
            self.error = error
        finally:
            self._ended.set()

    @property
    def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    def poll(self) -> int | None:
        """None while it lives, as a process would say."""
        return 0 if self._ended.is_set() else None

    def await_end(self, timeout: float) -> None:
        """Returns when it has ended, or after so many seconds."""
        self._ended.wait(timeout)
