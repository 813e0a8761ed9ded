"""A follower gets every line, soon, whatever a file server says of the sizes of files."""

import threading
from pathlib import Path

import pytest
from tests.conftest import of_ranks, until

import rankzero.train as rt
from rankzero import Launcher, store
from rankzero.pipeline import open_run
from rankzero.run import reports


def speak(folder: str) -> None:
    """Prints "one", and "two" once a reader has the first line."""
    print("one")
    until(Path(folder, "heard").exists, 30.0, "a reader of the first line")
    print("two")


def follow(launcher: Launcher, folder: Path) -> list[str]:
    heard = []
    for line in launcher.submit(speak, str(folder)).logs(follow=True):
        heard.append(line)
        if line.endswith("one"):
            (folder / "heard").touch()
    return sorted(of_ranks(heard))


def test_a_log_that_has_grown_is_read_at_the_next_look(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "1000")
    assert follow(launcher, tmp_path) == ["[0] one", "[0] two", "[1] one", "[1] two"]


def test_reports_are_those_of_the_last_training_from_scratch(launcher: Launcher) -> None:
    launcher = launcher.options(run_id="again", num_processes=1)

    def train(rate: float) -> None:
        rt.report({"rate": rate})

    launcher.run(train, 0.5)
    handle = launcher.submit(train, 0.25)
    handle.result(60)
    assert [row["rate"] for row in handle.metrics()] == [0.25]
    states = [event for event in handle.events() if event["type"] == "state"]
    assert {event["submission"] for event in states} == {1}
    assert [row["rate"] for row in reports.rows_of(handle.events(follow=True))] == [0.25]


def test_a_store_that_fails_when_a_run_is_followed_does_not_end_it(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a client of an object store does that is asked too often."""
    read, names = store.read_bytes, {"status.json", "lease"}

    def fail_once(location: str) -> bytes:
        name = location.rpartition("/")[2]
        is_follower = threading.current_thread() is threading.main_thread()
        if is_follower and name in names and followed:
            names.remove(name)
            raise ConnectionError("slow down")
        return read(location)

    followed: list[bool] = []
    with open_run(launcher.options(num_processes=1, run_id="run", orphan_timeout=60.0), max, (1, 2), {}) as handle:
        followed.append(True)
        monkeypatch.setattr(store, "read_bytes", fail_once)
        assert of_ranks(handle.logs(follow=True)) == []
        assert handle.result(60) == 2
    assert "status.json" not in names
