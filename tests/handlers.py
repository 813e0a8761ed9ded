"""No test leaves other handlers of signals than it found. A pytest plugin, which `tests/conftest.py` loads."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGCHLD", "SIGPIPE", "SIGUSR1", "SIGUSR2")
"""Signals whose handlers every test must leave unchanged. pytest-timeout has SIGALRM."""


def signal_handlers() -> dict[str, Any]:
    """Returns this process's handler of each of these signals."""
    return {name: signal.getsignal(getattr(signal, name)) for name in SIGNALS}


def restore_signal_handlers(before: dict[str, Any]) -> dict[str, Any]:
    """Sets the handlers again; returns those that had changed."""
    changed = {name: handler for name, handler in signal_handlers().items() if handler is not before[name]}
    for name in changed:
        signal.signal(getattr(signal, name), before[name])
    return changed


@pytest.fixture(autouse=True)
def same_signal_handlers() -> Iterator[None]:
    """Fails a test that changes a handler: every process that a later test starts would ignore what is ignored here."""
    before = signal_handlers()
    yield
    assert restore_signal_handlers(before) == {}, "handlers of signals are others after the test"


@pytest.fixture(autouse=True, scope="module")
def same_signal_handlers_of_fixtures() -> Iterator[None]:
    """Does the same for the fixtures of a whole file."""
    before = signal_handlers()
    yield
    assert restore_signal_handlers(before) == {}, "handlers of signals are others after the tests of this file"
