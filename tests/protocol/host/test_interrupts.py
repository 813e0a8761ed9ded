"""An exception of a signal handler leaves nothing locked for the other threads, wherever it is raised."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests import interrupted

from rankzero.driver.driver import DriverThread
from rankzero.host.forks import held

MOMENT = 0.0001


def completes(action: Callable[[], Any]) -> bool:
    """Returns True if an action that another thread takes ends within seconds."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(10)
    return not thread.is_alive()


def test_a_wait_for_a_driver_thread_may_be_interrupted_anywhere() -> None:
    driver, may_end = None, threading.Event()

    class Stub:
        """A driver that ends when the test says so."""

        def run(self) -> None:
            may_end.wait(60)

    def waiting() -> Callable[[], None]:
        nonlocal driver, may_end
        may_end = threading.Event()
        driver = DriverThread(Stub())  # type: ignore[arg-type]
        driver.start()
        return lambda: driver.await_end(MOMENT)

    last = None
    for last in interrupted.everywhere(waiting):
        assert driver is not None
        assert driver.poll() is None
        may_end.set()
        assert completes(lambda: driver.await_end(5)), f"moment {last}"
        assert driver.poll() == 0, f"moment {last}"
    assert last is not None
    may_end.set()


def test_a_hold_against_forks_may_be_interrupted_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "2")

    def hold_and_fork() -> None:
        with held():
            pass
        # Waits for every hold of another thread.
        if not (child := os.fork()):
            os._exit(0)
        os.waitpid(child, 0)

    last = None
    for last in interrupted.everywhere(lambda: held().__enter__):
        assert completes(hold_and_fork), f"moment {last}"
    assert last is not None


def test_a_signal_handler_may_hold_while_its_thread_enters_and_leaves() -> None:
    def hold() -> None:
        with held():
            pass

    assert list(interrupted.everywhere(lambda: hold, "rankzero/host/forks.py", handle=hold))
