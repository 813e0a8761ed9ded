"""An engine whose error cannot be read: of py4j's the words are in a JVM that no longer answers."""

import threading
from typing import Any

import pytest

from rankzero import EngineError, Launcher, LocalEngine
from rankzero.engines import base


class MuteError(Exception):
    def __str__(self) -> str:
        threading.Event().wait()
        return "never"


@pytest.mark.timeout(60)
def test_its_run_fails_all_the_same(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MuteError

    monkeypatch.setattr(LocalEngine, "open", fail)
    monkeypatch.setattr(base, "WORDS_TIMEOUT", 0.2)
    with pytest.raises(EngineError, match="could not be opened: MuteError"):
        launcher.options(num_processes=1).run(int)
