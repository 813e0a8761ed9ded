"""`Follower` yields each piece of news about a run once, and the end of the run last."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.runs import submitted

import rankzero.pipeline
from rankzero import Launcher, RunHandle, WorkerFailedError
from rankzero.run import follower as followers
from rankzero.run.directory import Submission
from rankzero.run.follower import Follower, LineWritten, MetricsReported
from rankzero.run.status import RunStatus


def train(fail: bool) -> str:
    import rankzero.train as rt

    print("hello", flush=True)
    rt.report({"loss": 0.5})
    if fail:
        raise ValueError("no data")
    return "value"


def test_a_follower_yields_lines_metrics_and_the_end_once(tmp_path: Path) -> None:
    handle = Launcher(2, store=str(tmp_path)).submit(train, False)
    follower = Follower(handle)
    events = list(follower.follow())
    lines = [event.text for event in events if isinstance(event, LineWritten)]
    # On a slow machine the driver adds a line about tasks that have not started.
    assert sorted(line for line in lines if "rankzero: " not in line) == ["[0] hello", "[1] hello"]
    assert [event.values for event in events if isinstance(event, MetricsReported)] == [{"loss": 0.5}]
    assert follower.ended
    assert follower.status is not None
    assert follower.status.state == "succeeded"
    assert handle.result() == "value"
    # A later follower that attaches sees the same; this one has nothing new.
    assert list(follower.poll()) == []
    again = [event.text for event in Follower(handle).poll() if isinstance(event, LineWritten)]
    assert sorted(again) == sorted(lines)


def test_every_name_of_the_interface_exists_and_is_documented() -> None:
    text = rankzero.pipeline.__doc__ or ""
    for name in rankzero.pipeline.__all__:
        assert getattr(rankzero.pipeline, name) is not None
        assert f"`{name}`" in text, f"{name} is not in the docstring of rankzero.pipeline"


@pytest.fixture
def run(tmp_path: Path) -> Submission:
    """A run of three ranks that each have written a line, and one for an earlier submission."""
    before = submitted(str(tmp_path / "run"), RunStatus(state="failed"), num_processes=3)
    own = submitted(before.run.directory, num_processes=3, submission=1, earlier=[before.name])
    for word, place in (("old", before), ("new", own)):
        Path(place.path("lines")).write_text("".join(f"[{rank}] {word} {rank}\n" for rank in range(3)))
    return own


def status(failed_rank: int | None = None) -> RunStatus:
    if failed_rank is None:
        return RunStatus(state="running")
    error = WorkerFailedError("it failed", rank=failed_rank, log_tail=["the last line"])
    return RunStatus(state="failed", error=json.loads(json.dumps(error.to_json())))


def follow(run: Submission, **options: Any) -> Follower:
    return Follower(RunHandle(run.run.directory), **options)


def lines(follower: Follower, run: Submission, status: RunStatus) -> list[str]:
    run.write_status(replace(status, heartbeat=time.time()))
    return [event.text for event in follower.poll() if isinstance(event, LineWritten)]


def test_every_rank_is_shown_from_where_the_submission_began(run: Submission) -> None:
    follower = follow(run)
    assert lines(follower, run, status()) == ["[0] new 0", "[1] new 1", "[2] new 2"]
    assert lines(follower, run, status()) == []
    assert list(RunHandle.attach(run.run.directory).logs(1)) == ["old 1", "new 1"]


def test_ranks_that_are_not_asked_for_are_silent_unless_they_fail(run: Submission) -> None:
    follower = follow(run, ranks=[1])
    assert lines(follower, run, status()) == ["[1] new 1"]
    assert lines(follower, run, status(failed_rank=0)) == ["[0] the last line"]
    # One that was shown is not shown twice.
    assert lines(follow(run, ranks=[0]), run, status(failed_rank=0)) == ["[0] new 0"]


def test_a_follower_renews_the_lease_also_while_it_shows_lines_or_none(run: Submission) -> None:
    own = submitted(run.run.directory, submission=2, orphan_timeout=1e-9)
    assert lines(follow(own, ranks=[]), own, status()) == []
    lease = own.lease()
    assert lease
    Path(own.path("lines")).write_text("[0] one\n" * 3)
    for _ in follow(own).poll():
        before, lease = lease, own.lease()
        assert lease != before


def test_a_follower_skips_what_it_is_too_far_behind(run: Submission, monkeypatch: pytest.MonkeyPatch) -> None:
    line = len("[1] line 000\n")
    monkeypatch.setattr(followers, "BEHIND_BYTES", 5 * line)
    follower = follow(run)
    assert len(lines(follower, run, status())) == 3

    def write(count: int) -> None:
        with open(run.path("lines"), "a") as log:
            log.writelines(f"[1] line {number:03}\n" for number in range(count))

    write(4)
    assert lines(follower, run, status()) == [f"[1] line {number:03}" for number in range(4)]
    write(100)
    left_out = f"(older lines were left out: rankzero logs {run.run.directory})"
    # The first line of the rest may be incomplete.
    assert lines(follower, run, status()) == [left_out, *(f"[1] line {number:03}" for number in range(96, 100))]
    # What is written while lines are shown is for the next look.
    write(4)
    shown = follower.poll()
    assert next(shown) == LineWritten("[1] line 000")
    write(100)
    assert list(shown) == [LineWritten(f"[1] line {number:03}") for number in range(1, 4)]
    assert lines(follow(run), run, status(1)) == [left_out, *(f"[1] line {number:03}" for number in range(96, 100))]
