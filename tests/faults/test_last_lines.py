"""The last lines and events of a run, and its last status, on a store that is slow or away while the run ends."""

import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.conftest import until
from tests.runs import submitted

from rankzero import RunHandle, store
from rankzero.driver import recorder as recorders
from rankzero.driver.recorder import Recorder
from rankzero.masking import Mask
from rankzero.run.directory import LINES, Submission
from rankzero.run.lines import Stream

WAIT = 60.0


def test_a_piece_that_lands_late_replaces_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, found = submitted(f"memory://{tmp_path.name}/run"), list[str]()
    through, stalled, may_land, landed = store.write_bytes, *(threading.Event() for _ in range(3))

    def write_bytes(location: str, data: bytes, *, durable: bool = False) -> None:
        # Only the first piece stalls.
        stalls = re.search(r"/\d{8}$", location) is not None and not stalled.is_set()
        if stalls:
            stalled.set()
            may_land.wait(WAIT)
        through(location, data, durable=durable)
        if stalls:
            landed.set()

    monkeypatch.setattr(store, "write_bytes", write_bytes)
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.0167")
    monkeypatch.setattr(recorders, "pace", lambda _: 0.05)
    recorder = Recorder(run, Mask())
    recorder.log(0, ["the first line"])
    recorder.update(attempt=0)
    assert stalled.wait(WAIT)
    recorder.log(0, ["the last line"])
    with caplog.at_level(logging.WARNING):
        recorder.finish(state="succeeded")
    promised = run.status().written[LINES]
    may_land.set()
    assert landed.wait(WAIT)
    # The status promises nothing that the late piece could take away, and somebody was told.
    stream = Stream([run.directory], LINES, lambda read: read())
    while lines := stream.read(stream.end(run.status())):
        found += lines
    assert sum(len(line) + 1 for line in found) >= promised[1]
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
