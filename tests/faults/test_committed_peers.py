"""Ranks that have committed wait for their peers: that holds up no stop, and their agent's end is no loss."""

import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import find, until, wait_until_gone
from tests.faults.kit import TasksEngine

from rankzero import Launcher, LocalEngine, RunCancelledError, RunHandle
from rankzero.driver.storage import Storage
from rankzero.engines.base import Engine

WAIT = 30.0

GRACE = 90.0  # Of a stop that nobody needs

SETTLED = 1.0  # Seconds from the end of a rank's code to its commit, and more


def train(folder: str) -> str:
    """Rank 0 stays until it may go; the others leave at once."""
    rank = os.environ["RANK"]
    Path(folder, f"agent-{rank}").write_text(str(os.getppid()))
    while rank == "0" and not Path(folder, "go").exists():
        time.sleep(0.05)
    return "whole"


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks of which the driver, a thread of this process, knows that they have committed."""
    ranks: list[int] = []
    finish = Storage.finish

    def note(storage: Storage, rank: int, *rest: Any) -> None:
        finish(storage, rank, *rest)
        ranks.append(rank)

    monkeypatch.setattr(Storage, "finish", note)
    return ranks


def committed(launcher: Launcher, value: Future[Any], finished: list[int]) -> RunHandle[Any]:
    """Waits until rank 1 has."""
    until(lambda: 1 in finished or value.done(), 120.0, "the end of rank 1")
    assert not value.done(), value.result()
    run = find(launcher)
    assert run is not None
    return run


@pytest.mark.parametrize(
    "engine", [LocalEngine(), pytest.param(TasksEngine(), marks=pytest.mark.soak)], ids=["one agent", "an agent each"]
)
def test_a_stop_does_not_wait_for_ranks_that_have_committed(
    launcher: Launcher, tmp_path: Path, marker: str, engine: Engine, finished: list[int]
) -> None:
    launcher = launcher.options(engine=engine, run_id="run", stop_grace=GRACE)
    with ThreadPoolExecutor(1) as executor:
        value = executor.submit(lambda: launcher.run(train, str(tmp_path)))
        committed(launcher, value, finished).cancel()
        with pytest.raises(RunCancelledError):
            value.result(WAIT)
    assert wait_until_gone(marker) == []


def test_an_agent_whose_ranks_have_committed_is_no_loss(
    launcher: Launcher, tmp_path: Path, finished: list[int]
) -> None:
    launcher = launcher.options(engine=TasksEngine(), run_id="run", stop_grace=0.5)
    with ThreadPoolExecutor(1) as executor:
        value = executor.submit(lambda: launcher.run(train, str(tmp_path)))
        try:
            committed(launcher, value, finished)
            os.kill(int((tmp_path / "agent-1").read_text()), signal.SIGTERM)
            with pytest.raises(TimeoutError):
                # Longer than one that left is waited for.
                value.result(5.0)
        finally:
            (tmp_path / "go").touch()
        assert value.result(WAIT) == "whole"


def stay(folder: str) -> None:
    """Rank 0 stays until it is asked to exit; the others leave at once, and heed no signal."""
    if os.environ["RANK"] == "0":
        Path(folder, "here").touch()
        while True:
            time.sleep(0.05)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def test_a_lost_driver_ends_ranks_that_have_committed_at_once(launcher: Launcher, tmp_path: Path, marker: str) -> None:
    handle = launcher.options(run_id="run", stop_grace=GRACE).submit(stay, str(tmp_path))
    until(lambda: any(event["type"] == "returned" for event in handle.events()), 120.0, "the end of rank 1")
    until((tmp_path / "here").exists, WAIT, "rank 0")
    time.sleep(SETTLED)
    os.kill(handle.status().driver_pid or 0, signal.SIGKILL)
    assert wait_until_gone(marker, WAIT) == []
