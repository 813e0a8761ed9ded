"""A run directory that a user removes by hand, while its run lives, and in which the run id is submitted again."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conftest import until, wait_until_gone
from tests.runs import submitted

from rankzero import Launcher, RunHandle, RunNotFoundError, store
from rankzero.host.processes import process_namespace
from rankzero.run import observer
from rankzero.run.status import RunStatus


def train(folder: str, name: str) -> str:
    """Reports a checkpoint again and again, until the folder says that this training is to end."""
    import time
    from pathlib import Path

    import rankzero.train as rt

    number = 0
    while not Path(folder, f"{name}-end").exists():
        rt.report({"number": number}, checkpoint={"who": name})
        number += 1
        Path(folder, f"{name}-begun").touch()
        time.sleep(0.05)
    return name


@pytest.mark.parametrize("submissions", [1, pytest.param(2, marks=pytest.mark.soak)], ids=["first", "second"])
def test_the_new_run_gets_nothing_of_the_removed_one(launcher: Launcher, tmp_path: Path, submissions: int) -> None:
    launcher = launcher.options(num_processes=1, run_id="same")
    place = str(tmp_path)
    for number in range(submissions - 1):
        (tmp_path / f"before-{number}-end").touch()
        before = launcher.submit(train, place, f"before-{number}")
        assert before.result(60) == f"before-{number}"
        before.acknowledge()
    mark = f"old-{os.getpid()}-{submissions}"
    old = launcher.options(env={"OF_RANK": mark}).submit(train, place, "old")
    until((tmp_path / "old-begun").exists, 60, "the old training")
    old_driver = old.status().driver_pid
    until(lambda: not _removes(Path(old.directory)), 30, "the removal")

    new = launcher.submit(train, place, "new")
    until((tmp_path / "new-begun").exists, 60, "the new training")
    until(lambda: new.checkpoints(), 60, "a checkpoint")
    assert wait_until_gone(f"OF_RANK={mark}") == [], "the old training ends by itself"
    assert {manifest.metrics["number"] for manifest in new.checkpoints()}
    assert new.status().state == "running"
    (tmp_path / "new-end").touch()
    assert new.result(60) == "new"
    assert RunHandle.attach(new.directory).status().driver_pid != old_driver
    if submissions == 1:
        with pytest.raises(RunNotFoundError, match="was removed"):
            old.result(10)


def write_and_wait(folder: str, name: str) -> Any:
    """Writes a row and a checkpoint, both before and after the folder has a file, and says how that went."""
    import time
    from pathlib import Path

    import rankzero.train as rt

    def write() -> object:
        table = rt.write_rows({"who": [name]})
        rt.report({}, checkpoint={"who": name})
        return table

    write()
    Path(folder, f"{name}-begun").touch()
    while not Path(folder, f"{name}-go").exists():
        time.sleep(0.05)
    said = Path(folder, f"{name}-said")
    try:
        table = write()
        rt.context.await_checkpoint()
    except Exception as error:
        said.write_text(str(error))
        raise
    said.write_text("wrote")
    return table


@pytest.mark.parametrize("place", ["local", pytest.param("bucket", marks=pytest.mark.soak)])
def test_ranks_of_a_removed_run_write_nothing_into_the_new_one(
    launcher: Launcher, request: pytest.FixtureRequest, tmp_path: Path, place: str
) -> None:
    folder = str(tmp_path)
    launcher = launcher.options(num_processes=1, run_id="same")
    if place == "bucket":
        launcher = launcher.options(store=f"{request.getfixturevalue('bucket')}/runs")
    mark = f"removed-{os.getpid()}-{place}"
    old = launcher.options(env={**(launcher.env or {}), "OF_RANK": mark}).submit(write_and_wait, folder, "old")
    until((tmp_path / "old-begun").exists, 60, "the old training")
    driver = psutil.Process(until(lambda: old.status().driver_pid, 30, "its driver"))
    # A driver that stands still cannot notice the removal, and its rank does not wait for it.
    driver.suspend()
    try:
        until(lambda: (store.remove(old.directory), not store.list_names(old.directory))[1], 30, "the removal")
        new = launcher.submit(write_and_wait, folder, "new")
        # At once: an agent waits for a driver that stands still no longer than CONNECTION_LOST_AFTER.
        (tmp_path / "old-go").touch()
        said = tmp_path / "old-said"
        # A file is there before its text.
        text = until(lambda: said.exists() and said.read_text(), 60, "the old rank")
        assert "was removed, or is another run's by now" in text
        until((tmp_path / "new-begun").exists, 60, "the new training")
    finally:
        driver.resume()
    assert wait_until_gone(f"OF_RANK={mark}") == [], "the old training ends by itself"
    # On an object store the driver asks for its directory every two minutes, and the suite does not wait for that.
    with contextlib.suppress(psutil.NoSuchProcess):
        driver.kill()
    (tmp_path / "new-go").touch()
    assert new.result(60).to_arrow().to_table().to_pydict() == {"who": ["new", "new"]}
    assert [manifest.index for manifest in new.checkpoints()] == [0, 1]


@pytest.mark.parametrize("place", ["{}/run", "memory://removed{}/run"])
def test_a_driver_that_ends_late_finds_that_its_run_was_removed(tmp_path: Path, place: str) -> None:
    own = submitted(place.format(tmp_path))
    store.remove(own.run.directory)
    with pytest.raises(FileNotFoundError):
        own.finish(RunStatus(state="succeeded"))


def _removes(directory: Path) -> bool:
    """Removes a directory into which processes still write; True if something is left."""
    shutil.rmtree(directory, ignore_errors=True)
    return directory.exists()


SIGNALLED = {"driver_pid": 4242, "driver_namespace": process_namespace(), "driver_start": "17"}


@pytest.mark.parametrize(
    ("facts", "signals"),
    [
        ({}, 1),
        ({"driver_start": None}, 0),
        ({"driver_start": "18"}, 0),
        ({"driver_namespace": "another"}, 0),
        ({"driver_pid": None}, 0),
        ({"driver_pid": 4243}, 0),
        ({"driver_thread": True}, 0),
    ],
    ids=["own", "macos", "its id again", "elsewhere", "not begun", "just starting", "of a caller"],
)
def test_a_cancel_signals_a_driver_that_is_a_process_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], signals: int
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr("rankzero.run.observer.process_state", lambda _, start: "S" if start in (None, "17") else None)
    monkeypatch.setattr(observer, "caught_signals", lambda pid: {observer.CANCEL} if pid == 4242 else set())
    monkeypatch.setattr("os.kill", lambda *signal: sent.append(signal))
    own = submitted(str(tmp_path / "run"), RunStatus(state="running", **{**SIGNALLED, **facts}))
    RunHandle.attach(own.run.directory).cancel()
    assert sent == [(4242, observer.CANCEL)] * signals
    assert own.cancel_request() == {"receiver": {}, "reason": ""}


@pytest.mark.parametrize("text", ["", "{}", "null"])
def test_a_request_of_another_version_ends_the_run_too(tmp_path: Path, text: str) -> None:
    own = submitted(str(tmp_path / "run"))
    assert own.cancel_request() is None
    Path(own.path("cancel")).write_text(text)
    assert own.cancel_request() == {"receiver": {}, "reason": ""}
