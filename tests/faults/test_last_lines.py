"""The last lines and events of a run, and its last status, on a store that is slow or away while the run ends."""

import asyncio
import logging
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.conftest import until
from tests.runs import submitted

from rankzero import RunHandle, store
from rankzero.driver import recorder as recorders
from rankzero.driver.recorder import Recorder
from rankzero.masking import Mask
from rankzero.run.directory import EVENTS, LINES, Submission
from rankzero.run.growing import Stream

WAIT = 60.0


class Store:
    """Takes pieces of lines and events when it is told to."""

    def __init__(self) -> None:
        self._through = store.write_bytes
        self.away = False
        self.refused = 0
        self.open = threading.Event()
        self.open.set()
        self.stalled = threading.Event()
        self.landed = threading.Event()

    def write_bytes(self, location: str, data: bytes, *, durable: bool = False) -> None:
        if re.search(r"/\d{8}$", location) is None:
            return self._through(location, data, durable=durable)
        if self.away:
            self.refused += 1
            raise ConnectionResetError("the store cannot be reached")
        if self.stalled.is_set() or self.open.is_set():
            return self._through(location, data)
        # Only the first request stalls.
        self.stalled.set()
        self.open.wait()
        self._through(location, data)
        self.landed.set()
        return None


@pytest.fixture
def pieces_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    made = Store()
    monkeypatch.setattr(store, "write_bytes", made.write_bytes)
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.04")
    monkeypatch.setattr(recorders, "pace", lambda _: 0.05)
    yield made
    made.away = False
    made.open.set()


@pytest.fixture
def run(tmp_path: Path) -> Submission:
    return submitted(f"memory://{tmp_path.name}/run")


def read(run: Submission, name: str) -> list[str]:
    """Everything that can be read by the final status."""
    stream, found = Stream([run.directory], name, lambda read: read()), []
    while lines := stream.read(stream.end(run.status())):
        found += lines
    return found


def texts(run: Submission) -> list[str]:
    """The lines of all ranks that can be read by the final status, without their times."""
    assert all(re.match(r"\[0\] \d{4}-\d\d-\d\dT[0-9:.]+Z\t", line) for line in read(run, LINES))
    return [re.sub(r" .*?\t", " ", line, count=1) for line in read(run, LINES)]


def test_an_outage_while_a_run_ends_loses_no_lines(run: Submission, pieces_store: Store) -> None:
    recorder = Recorder(run, Mask())
    recorder.log(0, ["the last line"])
    pieces_store.away = True
    with ThreadPoolExecutor(1) as executor:
        end = executor.submit(recorder.finish, state="succeeded")
        until(lambda: pieces_store.refused >= 4 or end.done(), WAIT, "tries that are refused")
        pieces_store.away = False
        end.result(WAIT)
    assert run.status().state == "succeeded"
    assert texts(run) == ["[0] the last line"]
    assert '"succeeded"' in read(run, EVENTS)[-1]


def test_a_disk_that_takes_nothing_delays_agents_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(recorders.Appender, "append", lambda *_: hangs.wait())
    monkeypatch.setattr(recorders, "MOST_QUEUED", 100)
    recorder = Recorder(submitted(str(tmp_path / "run")), Mask())

    recorder.log(0, ["x" * 60])
    for factor in (0.1, 2 * WAIT):
        monkeypatch.setenv("RANKZERO_TIME_SCALE", str(factor))
        asyncio.run(asyncio.wait_for(recorder.room(), WAIT))
    hangs.set()


def test_a_piece_that_lands_late_replaces_no_later_one(
    run: Submission, pieces_store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.0167")
    recorder = Recorder(run, Mask())
    pieces_store.open.clear()
    recorder.log(0, ["the first line"])
    recorder.update(attempt=0)
    assert pieces_store.stalled.wait(WAIT)
    recorder.log(0, ["the last line"])
    with caplog.at_level(logging.WARNING):
        recorder.finish(state="succeeded")
    promised = run.status().written[LINES]
    pieces_store.open.set()
    assert pieces_store.landed.wait(WAIT)
    # The status promises nothing that the late piece could take away, and somebody was told.
    assert sum(len(line) + 1 for line in read(run, LINES)) >= promised[1]
    assert "lines are lost" in caplog.text


def test_a_status_that_lands_late_hides_no_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request of a heartbeat was delayed and repeated, and arrives after the final status."""
    # A driver that is a thread counts as dead without a heartbeat for 18 s.
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.3")
    errors = {"succeeded": None, "failed": {"message": "the cause"}}

    def drive(run: Submission, state: str) -> None:
        recorder = Recorder(run, Mask())
        recorder.note_thread()
        recorder.update(state="running")
        until(lambda: run.status().state == "running", WAIT, "the first status")
        late = store.read_bytes(run.path("status.json"))
        recorder.finish(state=state, error=errors[state])
        assert RunHandle.attach(run.run.directory).status().state == state
        store.write_bytes(run.path("status.json"), late)

    runs = {state: submitted(f"memory://{tmp_path.name}/{state}") for state in errors}
    with ThreadPoolExecutor(1) as executor:
        for state, run in runs.items():
            executor.submit(drive, run, state).result(WAIT)
    handles = [RunHandle.attach(run.run.directory) for run in runs.values()]
    until(lambda: {handle.status().final for handle in handles} == {True}, WAIT, "the ends of two silent drivers")
    found = {handle.status().state: handle.status().error for handle in handles}
    assert found == errors
