"""Which lines a follower shows: of which ranks, from where on, and those of the rank that has failed."""

import json
from pathlib import Path

import pytest

from rankzero import RunHandle, WorkerFailedError
from rankzero.job import Job
from rankzero.run import LogCursor, RunDirectory, RunStatus
from rankzero.run import cursor as cursors


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run of three ranks that each have written two lines, the first of ranks 0 and 2 for an earlier submission."""
    run = RunDirectory(str(tmp_path / "run"))
    assert run.claim(0)
    run.write_submission(Job("run", "train", 3, 1, False, None, None, 60.0, {}, log_starts={"0": [0, 6], "2": [0, 6]}))
    for rank in range(3):
        (tmp_path / f"run/logs/rank-{rank}.log").write_text(f"old {rank}\nnew {rank}\n")
    return run


def status(failed_rank: int | None = None) -> RunStatus:
    if failed_rank is None:
        return RunStatus(state="running")
    error = WorkerFailedError("it failed", rank=failed_rank, log_tail=["the last line"])
    return RunStatus(state="failed", error=json.loads(json.dumps(error.to_json())))


def test_every_rank_is_shown_from_where_the_submission_began(run: RunDirectory) -> None:
    cursor = LogCursor(RunHandle(run.directory))
    assert sorted(cursor.lines(status())) == ["[0] new 0", "[1] new 1", "[1] old 1", "[2] new 2"]
    assert list(cursor.lines(status())) == []


def test_ranks_that_are_not_asked_for_are_silent_unless_they_fail(run: RunDirectory) -> None:
    cursor = LogCursor(RunHandle(run.directory), ranks=[1])
    assert list(cursor.lines(status())) == ["[1] old 1", "[1] new 1"]
    assert list(cursor.lines(status(failed_rank=0))) == ["[0] new 0"]
    # One that was shown is not shown twice.
    shown = LogCursor(RunHandle(run.directory), ranks=[0])
    assert list(shown.lines(status(failed_rank=0))) == ["[0] new 0"]


def test_a_follower_that_attaches_shows_again_only_what_is_little(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(list(LogCursor(RunHandle(run.directory), attached=True).lines(status()))) == 4
    monkeypatch.setattr(cursors, "REPLAY_BYTES", 5)
    attached = LogCursor(RunHandle(run.directory), ranks=[1], attached=True)
    assert list(attached.lines(status())) == []
    # Of much, the tail that came with the failure.
    assert list(attached.lines(status(failed_rank=2))) == ["[2] the last line"]
    assert len(list(LogCursor(RunHandle(run.directory)).lines(status()))) == 4


def test_a_follower_skips_what_it_is_too_far_behind(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursors, "BEHIND_BYTES", 3 * 40)
    monkeypatch.setattr(cursors, "LAST_BYTES", 3 * 20)
    monkeypatch.setattr(cursors, "_LEAST_SHARE", 1)
    cursor = LogCursor(RunHandle(run.directory))
    assert len(list(cursor.lines(status()))) == 4

    def write(count: int) -> None:
        with open(run.path("logs/rank-1.log"), "a") as log:
            log.writelines(f"line {number:03}\n" for number in range(count))

    write(4)
    assert list(cursor.lines(status())) == [f"[1] line {number:03}" for number in range(4)]
    write(100)
    left_out = f"[1] (0.0 MiB of lines left out: rankzero logs {run.directory})"
    assert list(cursor.lines(status())) == [left_out, *(f"[1] line {number:03}" for number in range(96, 100))]
    # What is written while lines are shown is for the next look.
    write(4)
    shown = cursor.lines(status())
    assert next(shown) == "[1] line 000"
    write(100)
    assert list(shown) == [f"[1] line {number:03}" for number in range(1, 4)]
    # At the end the result waits for the follower.
    assert list(cursor.lines(status(failed_rank=1))) == [left_out, "[1] line 098", "[1] line 099"]
    write(100)
    whole = LogCursor(RunHandle(run.directory), ranks=[1], whole=True)
    assert len(list(whole.lines(status()))) == 2 + 4 + 100 + 4 + 100 + 100
