"""Lines of ranks: each has the time at which the driver received it, and all are in the order of their times."""

from __future__ import annotations

import logging
import time
import tracemalloc
from pathlib import Path

import pytest

from rankzero import RunHandle, store
from rankzero.driver.recorder import Recorder
from rankzero.job import Job
from rankzero.masking import Mask
from rankzero.pipeline import level_of
from rankzero.run.directory import RunDirectory
from rankzero.run.growing import Position
from rankzero.run.names import LINES

HOUR = 3600.0
BEGIN = 1_800_000_000.0


def made(directory: str, ranks: int = 2) -> RunDirectory:
    run = RunDirectory(directory)
    assert run.claim(0)
    run.write_submission(Job("run", "train", ranks, 1, False, None, None, 60.0, {}))
    return run


def write(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, lines: list[tuple[float, int, str]]) -> None:
    recorder = Recorder(run, run.job(), Mask())
    for when, rank, text in lines:
        monkeypatch.setattr(time, "time", lambda when=when: BEGIN + when)
        recorder.log(rank, [text])
    recorder.finish(state="succeeded")


LINES_OF_TWO = [(0.0, 1, "one"), (1.5, 0, "two"), (1.6, 1, "2026-01-02 three"), (HOUR, 0, "four")]


@pytest.mark.parametrize("place", ["disk", "memory://lines"])
def test_lines_are_in_the_order_of_their_times(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(f"{place}/{tmp_path.name}/run" if "://" in place else str(tmp_path / "run"))
    write(run, monkeypatch, LINES_OF_TWO)
    handle = RunHandle.attach(run.directory)
    assert list(handle.logs()) == ["[1] one", "[0] two", "[1] 2026-01-02 three", "[0] four"]
    found = list(handle.output.timed_lines(dict.fromkeys(range(2), Position()), follow=False))
    assert [(round((line.time or 0) - BEGIN, 3), line.rank, line.text) for line in found] == LINES_OF_TWO
    assert list(handle.logs(1)) == ["one", "2026-01-02 three"]


def test_lines_of_an_earlier_version_have_no_time(tmp_path: Path) -> None:
    run = made(str(tmp_path / "run"))
    for rank in range(2):
        (tmp_path / f"run/logs/rank-{rank}.log").write_text(f"first {rank}\nlast {rank}\n")
    handle = RunHandle.attach(run.directory)
    assert list(handle.logs()) == ["[0] first 0", "[0] last 0", "[1] first 1", "[1] last 1"]
    assert {line.time for line in handle.output.timed_lines({0: Position()}, follow=False)} == {None}


def test_a_line_without_a_time_has_that_of_the_line_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(str(tmp_path / "run"))
    write(run, monkeypatch, LINES_OF_TWO[:2])
    with open(run.path("logs/rank-1.log"), "a") as log:
        log.write("rankzero: 3 lines could not be written here\n")
    found = list(RunHandle.attach(run.directory).output.timed_lines({1: Position()}, follow=False))
    assert [line.text for line in found] == ["one", "rankzero: 3 lines could not be written here"]
    assert {line.time for line in found} == {BEGIN}


def test_the_note_about_lines_that_a_full_disk_refused_has_its_own_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made(str(tmp_path / "run"))
    recorder = Recorder(run, run.job(), Mask())
    monkeypatch.setattr(time, "time", lambda: BEGIN)
    recorder.log(0, ["one"])
    (tmp_path / "run/logs/rank-1.log").mkdir()
    recorder.log(1, ["lost"])
    recorder._thread.submit(int).result(60)
    (tmp_path / "run/logs/rank-1.log").rmdir()
    monkeypatch.setattr(time, "time", lambda: BEGIN + HOUR)
    recorder.log(1, ["two"])
    recorder._thread.submit(int).result(60)
    found = list(RunHandle.attach(run.directory).output.timed_lines({1: Position()}, follow=False))
    note = "rankzero: 1 lines could not be written here"
    assert [(line.time, line.text) for line in found] == [(BEGIN + HOUR, note), (BEGIN + HOUR, "two")]


def test_stored_lines_of_a_stream_begin_with_their_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a reader of an earlier version expects them."""
    run = made(f"memory://lines/{tmp_path.name}/run")
    write(run, monkeypatch, LINES_OF_TWO[:1])
    assert store.read_bytes(run.path(LINES, "00000000")) == b"[1] 2027-01-15T08:00:00.000Z\tone\n"


def test_a_line_that_only_begins_like_a_time_has_none(tmp_path: Path) -> None:
    run = made(str(tmp_path / "run"))
    (tmp_path / "run/logs/rank-0.log").write_text("2026-13-45T99:99:99.999Z\tno time\n")
    assert [
        line.time for line in RunHandle.attach(run.directory).output.timed_lines({0: Position()}, follow=False)
    ] == [None]


def test_positions_advance_with_the_lines_that_were_yielded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of all ranks are compared, so some of each are read before the first one is yielded."""
    run = made(str(tmp_path / "run"))
    write(run, monkeypatch, LINES_OF_TWO)
    monkeypatch.setattr("rankzero.run.growing.READ_MIN", 32)
    monkeypatch.setattr("rankzero.run.growing.READ", 64)
    handle, positions = RunHandle.attach(run.directory), dict.fromkeys(range(2), Position())
    lines = handle.output.timed_lines(positions, follow=False)
    assert [next(lines).text, next(lines).text] == ["one", "two"]
    lines.close()
    # Rank 1's first line was followed by another one, rank 0's was not.
    assert (positions[0].offset, positions[1].offset > 0) == (0, True)
    rest = [line.text for line in handle.output.timed_lines(positions, follow=False)]
    assert rest == ["two", "2026-01-02 three", "four"]


def test_the_lines_of_many_ranks_that_are_read_ahead_take_little_memory(tmp_path: Path) -> None:
    ranks, line = 64, "x" * 1023 + "\n"
    run = made(str(tmp_path / "run"), ranks)
    for rank in range(ranks):
        (tmp_path / f"run/logs/rank-{rank}.log").write_text(line * 1024)
    lines = RunHandle.attach(run.directory).output.timed_lines(dict.fromkeys(range(ranks), Position()), follow=False)
    tracemalloc.start()
    next(lines)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.parametrize(
    ("line", "level"), [("[3] ERROR: no such file", logging.ERROR), ("[3] no ERROR at all", logging.INFO)]
)
def test_a_line_has_the_level_that_it_begins_with(line: str, level: int) -> None:
    assert level_of(line) == level
