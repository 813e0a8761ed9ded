"""An engine that is silent for long, or whose error cannot be read: py4j's words are in a JVM that does not answer."""

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.conftest import until
from tests.runs import lines_of

from rankzero import Launcher, LocalEngine, StartTimeoutError
from rankzero.engines.base import EngineSession
from rankzero.job import Job

WAIT = 60.0


def test_whoever_waits_for_an_engine_sees_what_for(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_engine, answers = LocalEngine.open, threading.Event()

    def answer_late(engine: LocalEngine, job: Job, env: Mapping[str, str]) -> EngineSession:
        answers.wait(WAIT)
        return open_engine(engine, job, env)

    monkeypatch.setattr(LocalEngine, "open", answer_late)
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.02")
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(launcher.options(num_processes=1, run_id="run").run, int)
        try:
            until(lambda: "waiting for the engine" in lines_of(tmp_path / "store" / "run"), WAIT, "a line")
        finally:
            answers.set()
        assert running.result(WAIT) == 0


def test_a_session_that_opens_after_its_run_has_ended_is_closed(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_engine, answers, closed = LocalEngine.open, threading.Event(), threading.Event()

    def answer_late(engine: LocalEngine, job: Job, env: Mapping[str, str]) -> EngineSession:
        answers.wait(WAIT)
        session = open_engine(engine, job, env)
        monkeypatch.setattr(session, "close", closed.set)
        return session

    monkeypatch.setattr(LocalEngine, "open", answer_late)
    with pytest.raises(StartTimeoutError, match="did not answer within"):
        launcher.options(num_processes=1, start_timeout=0.5).run(int)
    assert not closed.is_set()
    answers.set()
    assert closed.wait(WAIT)
