"""Lines of ranks: each has the time at which the driver received it, and all are in the order of their times."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from tests.runs import submitted

from rankzero import RunHandle, store
from rankzero.driver import recorder as recorders
from rankzero.driver.recorder import Recorder
from rankzero.masking import Mask
from rankzero.run.directory import Submission

HOUR = 3600.0
BEGIN = 1_800_000_000.0


def write(own: Submission, monkeypatch: pytest.MonkeyPatch, lines: list[tuple[float, int, str]]) -> RunHandle[None]:
    recorder = Recorder(own, Mask())
    for when, rank, text in lines:
        monkeypatch.setattr(time, "time", lambda when=when: BEGIN + when)
        recorder.log(rank, [text])
    recorder.finish(state="succeeded")
    return RunHandle.attach(own.run.directory)


LINES_OF_TWO = [(0.0, 1, "one"), (1.5, 0, "two"), (1.6, 1, "2026-01-02 three"), (HOUR, 0, "four")]


@pytest.mark.parametrize("place", ["disk", "memory://lines"])
def test_lines_are_in_the_order_of_their_times(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = submitted(f"{place}/{tmp_path.name}/run" if "://" in place else str(tmp_path / "run"), num_processes=2)
    handle = write(own, monkeypatch, LINES_OF_TWO)
    assert list(handle.logs()) == ["[1] one", "[0] two", "[1] 2026-01-02 three", "[0] four"]
    found = list(handle.lines())
    assert [(round((line.time or 0) - BEGIN, 3), line.rank, line.text) for line in found] == LINES_OF_TWO
    assert list(handle.logs(1)) == ["one", "2026-01-02 three"]
    file = own.path("lines", "00000000") if own.is_remote else own.path("lines")
    assert store.read_bytes(file).startswith(b"[1] 2027-01-15T08:00:00.000Z\tone\n")


def test_a_line_without_a_time_has_that_of_the_line_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = submitted(str(tmp_path / "run"))
    handle = write(own, monkeypatch, LINES_OF_TWO[:1])
    with open(own.path("lines"), "a") as log:
        log.write("rankzero: 3 lines could not be written here\n")
    found = list(handle.lines(ranks=[0]))
    assert [(line.rank, line.text) for line in found] == [(None, "rankzero: 3 lines could not be written here")]
    assert {line.time for line in handle.lines()} == {BEGIN}


def test_the_note_about_lines_that_a_full_disk_refused_has_its_own_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = submitted(str(tmp_path / "run"))
    recorder = Recorder(own, Mask())
    monkeypatch.setattr(time, "time", lambda: BEGIN)
    (tmp_path / own.path("lines")).mkdir()
    recorder.log(1, ["lost"])
    recorder._appending.submit(int).result(60)
    (tmp_path / own.path("lines")).rmdir()
    monkeypatch.setattr(time, "time", lambda: BEGIN + HOUR)
    recorder.log(1, ["two"])
    recorder._appending.submit(int).result(60)
    found = list(RunHandle.attach(own.run.directory).lines())
    note = "rankzero: 1 lines could not be written here"
    assert [(line.time, line.text) for line in found] == [(BEGIN + HOUR, note), (BEGIN + HOUR, "two")]


def test_a_slow_disk_costs_lines_of_ranks_but_no_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "MOST_QUEUED", 100)
    own, may_write = submitted(str(tmp_path / "run")), threading.Event()
    recorder = Recorder(own, Mask())
    recorder._appending.submit(may_write.wait)
    for number in range(20):
        recorder.log(0, ["x" * 15])
        recorder.metrics(0, [({"step": number}, BEGIN)])
    may_write.set()
    recorder.finish(state="succeeded")
    handle = RunHandle.attach(own.run.directory)
    assert [row["step"] for row in handle.metrics()] == list(range(20))
    assert list(handle.logs()) == ["[0] " + "x" * 15, "rankzero: 19 lines could not be written here"]


def test_a_line_that_only_begins_like_a_time_has_none(tmp_path: Path) -> None:
    own = submitted(str(tmp_path / "run"))
    Path(own.path("lines")).write_text("[0] 2026-13-45T99:99:99.999Z\tno time\n")
    assert [line.time for line in RunHandle.attach(own.run.directory).lines()] == [None]
