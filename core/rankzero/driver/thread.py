"""`DriverThread`: a driver that runs in a thread of the caller's process."""

from __future__ import annotations

import os
import threading

from rankzero.driver.driver import Driver


class DriverThread(threading.Thread):
    """A driver in a thread of the caller's process. ``error`` has the exception that `Driver.run` raised, if any."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(name="rankzero-driver", daemon=True)
        self.driver = driver
        self.error: BaseException | None = None
        # join() with a timeout and is_alive() are unusable: before CPython 3.13, an exception that a signal handler
        # raises inside join() makes a running thread look finished.
        self._ended = threading.Event()

    def run(self) -> None:
        """Runs the driver until the run has ended."""
        try:
            self.driver.run()
        except BaseException as error:
            self.error = error
        finally:
            self._ended.set()

    @property
    def pid(self) -> int:
        """The process id of the caller's process."""
        return os.getpid()

    def poll(self) -> int | None:
        """Returns None while the driver runs, then 0, like `subprocess.Popen.poll`."""
        return 0 if self._ended.is_set() else None

    def await_end(self, timeout: float) -> None:
        """Waits until the driver has finished, for at most ``timeout`` seconds."""
        self._ended.wait(timeout)
