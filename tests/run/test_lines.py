"""Lines of ranks: each has the time at which the driver received it, and all are in the order of their times."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from rankzero import RunHandle, store
from rankzero.driver import Recorder
from rankzero.job import Job
from rankzero.pipeline import level_of
from rankzero.run import LINES, Position, RunDirectory

HOUR = 3600.0
BEGIN = 1_800_000_000.0


def made(directory: str, ranks: int = 2) -> RunDirectory:
    run = RunDirectory(directory)
    assert run.claim(0)
    run.write_submission(Job("run", "train", ranks, 1, False, None, None, 60.0, {}))
    return run


def write(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, lines: list[tuple[float, int, str]]) -> None:
    recorder = Recorder(run, 0, 0)
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
    found = list(handle.timed_lines(dict.fromkeys(range(2), Position()), follow=False))
    assert [(round((line.time or 0) - BEGIN, 3), line.rank, line.text) for line in found] == LINES_OF_TWO
    assert list(handle.logs(1)) == ["one", "2026-01-02 three"]


def test_lines_of_an_earlier_version_have_no_time(tmp_path: Path) -> None:
    run = made(str(tmp_path / "run"))
    for rank in range(2):
        (tmp_path / f"run/logs/rank-{rank}.log").write_text(f"first {rank}\nlast {rank}\n")
    handle = RunHandle.attach(run.directory)
    assert list(handle.logs()) == ["[0] first 0", "[0] last 0", "[1] first 1", "[1] last 1"]
    assert {line.time for line in handle.timed_lines({0: Position()}, follow=False)} == {None}


def test_a_line_without_a_time_has_that_of_the_line_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(str(tmp_path / "run"))
    write(run, monkeypatch, LINES_OF_TWO[:2])
    with open(run.path("logs/rank-1.log"), "a") as log:
        log.write("rankzero: 3 lines could not be written here\n")
    found = list(RunHandle.attach(run.directory).timed_lines({1: Position()}, follow=False))
    assert [line.text for line in found] == ["one", "rankzero: 3 lines could not be written here"]
    assert {line.time for line in found} == {BEGIN}


def test_stored_lines_of_a_stream_begin_with_their_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a reader of an earlier version expects them."""
    run = made(f"memory://lines/{tmp_path.name}/run")
    write(run, monkeypatch, LINES_OF_TWO[:1])
    assert store.read_bytes(run.path(LINES, "00000000")) == b"[1] 2027-01-15T08:00:00.000Z\tone\n"


@pytest.mark.parametrize(
    ("line", "level"), [("[3] ERROR: no such file", logging.ERROR), ("[3] no ERROR at all", logging.INFO)]
)
def test_a_line_has_the_level_that_it_begins_with(line: str, level: int) -> None:
    assert level_of(line) == level
