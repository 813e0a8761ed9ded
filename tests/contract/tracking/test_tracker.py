"""Trackers learn what happens in a run, and are never in its way."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import until
from tests.runs import submitted

from rankzero import InvalidJobError, Launcher, LocalEngine, RunHandle, WorkerFailedError
from rankzero.driver.driver import Trackers
from rankzero.driver.recorder import Recorder
from rankzero.masking import Mask
from rankzero.run.status import RunStatus
from rankzero.submit.pack import pack_trackers
from rankzero.tracking import Tracker
from rankzero.tracking.mlflow import training_of
from rankzero.tracking.tracker import Row, Rows

# Not in this source, which is shipped with the run.
SECRET = "-".join(["geheim", "4711"])


class Notes(Tracker):
    """Writes what it is called with into a file, a line each."""

    def __init__(self, path: Path, token: str = "") -> None:
        self.path, self.token = path, token

    def note(self, **what: Any) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps({"pid": os.getpid(), **what}) + "\n")

    def begin(self, run: RunHandle[Any]) -> None:
        self.note(begin=run.id, params=run.params)

    def add(self, run: RunHandle[Any], events: list[dict[str, Any]]) -> None:
        for event in events:
            self.note(event=event)

    def end(self, run: RunHandle[Any], status: RunStatus) -> None:
        self.note(end=status.state)


class Idempotent(Notes):
    is_idempotent = True


class Broken(Notes):
    def __init__(self, path: Path, token: str, url: str) -> None:
        super().__init__(path, token)
        self.url = url

    def add(self, run: RunHandle[Any], events: list[dict[str, Any]]) -> None:
        raise OSError(f"no answer from {self.url} or {os.environ.get('SERVER')} with {self.token}")


class Hanging(Tracker):
    def begin(self, run: RunHandle[Any]) -> None:
        threading.Event().wait()


def noted(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


SHOWN = ("starting", "running", "metric", "restart", "failure", "succeeded", "failed")


def kinds(rows: list[dict[str, Any]]) -> list[str]:
    events = [row["event"] for row in rows if "event" in row]
    found = [event["state"] if event["type"] == "state" else event["type"] for event in events]
    return [kind for kind in found if kind in SHOWN]


def train(steps: int, *, fails: bool = False, api_key: str = "none") -> str:
    import rankzero.train as rt

    for step in range(steps):
        rt.report({"step": step, "loss": 1 / (step + 1)})
    if fails:
        raise ValueError("no luck")
    return "done"


def test_a_tracker_learns_what_happens_in_its_order(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    launcher = Launcher(1, store=tmp_path / "runs", trackers=[Notes(notes)], run_id="one")
    assert launcher.run(train, 2, api_key=SECRET) == "done"
    rows = noted(notes)
    assert rows[0]["begin"] == "one"
    assert rows[0]["params"] == {"steps": 2, "fails": False, "api_key": "***"}
    assert kinds(rows) == ["starting", "running", "metric", "metric", "succeeded"]
    assert rows[-1]["end"] == "succeeded"


def test_a_submitted_run_is_tracked_by_its_driver_and_no_file_holds_what_is_secret(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    launcher = Launcher(1, store=tmp_path / "runs", trackers=[Notes(notes, token=SECRET)], run_id="one")
    handle = launcher.submit(train, 1)
    assert handle.result(timeout=60) == "done"
    handle.await_driver(30)
    rows = noted(notes)
    assert rows[-1]["end"] == "succeeded"
    assert {row["pid"] for row in rows} == {handle.status().driver_pid} != {os.getpid()}
    for path in (tmp_path / "runs").rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


def test_a_resumed_training_is_told_once_or_from_its_beginning(tmp_path: Path) -> None:
    once, again = tmp_path / "once", tmp_path / "again"
    launcher = Launcher(1, store=tmp_path, run_id="one", code_version="1", trackers=[Notes(once), Idempotent(again)])
    marker = tmp_path / "marker"

    def fail_first(path: str) -> str:
        import rankzero.train as rt

        rt.report({"step": 1})
        if not os.path.exists(path):
            open(path, "w").close()
            raise ValueError("no luck")
        return "done"

    with pytest.raises(WorkerFailedError):
        launcher.run(fail_first, str(marker))
    launcher.run(fail_first, str(marker))
    first = ["starting", "running", "metric", "failure", "failed"]
    second = ["starting", "running", "metric", "succeeded"]
    assert kinds(noted(once)) == first + second
    assert kinds(noted(again)) == first + first + second
    # Another training under the same name is another one.
    launcher.options(code_version="2").run(fail_first, str(marker))
    assert kinds(noted(again))[-len(second) - 1 :] == ["succeeded", *second]


def test_what_a_tracker_raises_is_one_line_without_its_secrets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    monkeypatch.setenv("SERVER_TOKEN", "of-the-server")
    monkeypatch.setenv("SERVER", "http://you:of-yours@host/of-the-server")
    broken = Broken(tmp_path / "broken", SECRET, "http://me:word-of-mine@host/")
    with caplog.at_level(logging.WARNING):
        assert Launcher(1, store=tmp_path, trackers=[broken, Notes(notes)]).run(train, 1) == "done"
    assert [noted(path)[-1]["end"] for path in (notes, broken.path)] == ["succeeded"] * 2
    (line,) = [record.getMessage() for record in caplog.records if "misses" in record.getMessage()]
    cause = "OSError: no answer from http://me:***@host/ or http://you:***@host/*** with ***"
    assert line == f"Broken misses events of the run: {cause}"


@pytest.mark.parametrize("place", ["disk", "object store"])
def test_a_tracker_that_is_late_gets_the_events_of_its_own_submission(
    place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    root = tmp_path if place == "disk" else request.getfixturevalue("bucket")
    first, notes = submitted(f"{root}/one"), tmp_path / "notes"
    trackers, recorder = Trackers(first, pack_trackers([Notes(notes)], LocalEngine())), Recorder(first, Mask())
    recorder.update(state="starting")
    recorder.event({"type": "failure", "what": "no luck"})
    recorder.finish(state="failed")
    second = submitted(f"{root}/one", submission=1, first_attempt=1, earlier=[first.name])
    later = Recorder(second, Mask())
    later.update(state="starting")
    trackers.start()
    trackers.ended.set()
    trackers.close()
    assert kinds(noted(notes)) == ["starting", "failure", "failed"]
    assert noted(notes)[-1]["end"] == "failed"
    later.finish(state="failed")


def test_a_tracker_that_hangs_does_not_hold_the_result(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.05")
    notes = tmp_path / "notes"
    assert Launcher(1, store=tmp_path, trackers=[Hanging(), Notes(notes)]).run(train, 1) == "done"
    # The other one has its own thread, which may take longer than that bound on a busy machine.
    until(lambda: "end" in (noted(notes) or [{}])[-1], 60, "the end is noted")
    assert noted(notes)[-1]["end"] == "succeeded"
    assert "Hanging has not taken the end of the run" in caplog.text


def test_what_is_no_tracker_or_cannot_travel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidJobError, match=r"trackers is \['mlflow'\]; give a list of objects of subclasses"):
        Launcher(1, trackers=["mlflow"])  # type: ignore[list-item]
    lock = Notes(tmp_path)
    lock.token = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(InvalidJobError, match="Notes, which cannot be pickled.*make clients in begin"):
        Launcher(1, trackers=[lock], store=tmp_path / "runs").run(train, 1)
    assert not (tmp_path / "runs").exists()


def report(loss: float) -> None:
    import rankzero.train as rt

    rt.report({"loss": loss})


def test_the_id_of_a_training_is_the_same_when_it_is_resumed_and_of_no_other_one(tmp_path: Path) -> None:
    """Also not of one whose directory has the same path, on a new disk or since the old one was removed."""
    launcher, marker = Launcher(1, store=tmp_path, run_id="nightly"), tmp_path / "marker"

    def fail_first(path: str) -> None:
        if not os.path.exists(path):
            open(path, "w").close()
            raise ValueError("no luck")

    def training() -> str:
        run = RunHandle.attach(tmp_path / "nightly")
        return training_of(run)

    with pytest.raises(WorkerFailedError):
        launcher.run(fail_first, str(marker))
    failed = training()
    launcher.run(fail_first, str(marker))
    assert training() == failed
    found = {failed}
    for loss in (0.25, 0.5):
        launcher.run(report, loss)
        found.add(training())
    shutil.rmtree(tmp_path / "nightly")
    launcher.run(report, 0.25)
    assert len({*found, training()}) == 4


def metric(rank: int, **metrics: Any) -> dict[str, Any]:
    return {"type": "metric", "time": 1.0, "rank": rank, "metrics": metrics}


def test_rows_are_at_their_step_or_counted() -> None:
    events = [metric(0, loss=1.0), metric(1, loss=9.0), metric(0, loss=0.5, step=7, note="x", done=True), {"type": "x"}]
    assert list(Rows((0,)).of(events)) == [Row(0, 1, 1.0, {"loss": 1.0}), Row(0, 7, 1.0, {"loss": 0.5})]
    assert [row.rank for row in Rows(None).of(events)] == [0, 1, 0]
    (row,) = Rows((0,)).of([metric(0, loss=float("nan"), epoch=3)])
    assert row.step == 3
    assert math.isnan(row.metrics["loss"])


def test_what_no_system_could_store_is_left_out() -> None:
    events = [metric(0, loss=0.5, step=2**63), metric(0, loss=0.25, step=2**62, huge=10**400)]
    assert [(row.step, row.metrics) for row in Rows((0,)).of(events)] == [(1, {"loss": 0.5}), (2**62, {"loss": 0.25})]
