"""Handles keep to the submission that they were made for, whatever is submitted under its run id afterwards."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import find, until

from rankzero import (
    InvalidJobError,
    Launcher,
    ResultError,
    RunHandle,
    RunNotFoundError,
    WorkerFailedError,
    store,
)
from rankzero.run.checkpoints import list_committed
from rankzero.run.directory import RunDirectory


@pytest.fixture
def single(launcher: Launcher) -> Launcher:
    return launcher.options(num_processes=1, run_id="same")


def train(value: object, folder: str = "") -> object:
    import os
    import time

    open(os.path.join(folder, f"{value}-begun"), "w").close()
    while folder and not os.path.exists(os.path.join(folder, f"{value}-go")):
        time.sleep(0.02)
    if value == "fails":
        raise ValueError("no value")
    return value


def test_a_handle_returns_the_value_of_its_own_submission(single: Launcher, tmp_path: Path) -> None:
    folder = str(tmp_path)
    for name in ("one", "fails"):
        (tmp_path / f"{name}-go").touch()
    one = single.submit(train, "one", folder)
    assert one.wait(60)
    fails = single.submit(train, "fails", folder)
    assert fails.wait(60)
    last = single.submit(train, "last", folder)
    until((tmp_path / "last-begun").exists, 60, "the last training")
    # A handle that another process makes now is one of the last submission.
    attached = RunHandle.attach(last.directory)
    assert attached.job.submission == last.job.submission == 2
    # The status may be written after the first rank has begun.
    until(lambda: attached.status().state == "running", 60, "the status")
    assert one.result(1) == "one"
    assert one.status().submission == 0
    with pytest.raises(WorkerFailedError, match="no value"):
        fails.result(1)
    # The receiver of the first value acknowledges that value, and no other one.
    one.acknowledge()
    one.cancel()
    assert one.delivery().acknowledged
    assert one.status().state == "succeeded", "a cancel after the success changes nothing"
    assert not last.delivery().acknowledged
    (tmp_path / "last-go").touch()
    assert last.result(60) == "last"
    assert single.submit(train, "last", folder).job.submission == last.job.submission, "its value is not delivered yet"


def test_without_a_value_there_is_nothing_to_acknowledge(single: Launcher, tmp_path: Path) -> None:
    (tmp_path / "fails-go").touch()
    handle = single.submit(train, "fails", str(tmp_path))
    assert handle.wait(60)
    with pytest.raises(ResultError, match="has no result that could be acknowledged: it is failed"):
        handle.acknowledge()
    assert not handle.delivery().acknowledged


def test_the_handle_of_a_removed_run_acknowledges_no_other_run(single: Launcher, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}-go").touch()
    one = single.submit(train, "one", str(tmp_path))
    assert one.result(60) == "one"
    # Its driver may still write the report.
    until(
        lambda: (shutil.rmtree(one.directory, ignore_errors=True), not os.path.exists(one.directory))[1], 30, "no run"
    )
    two = single.submit(train, "two", str(tmp_path))
    assert two.wait(60)
    for call in (one.acknowledge, lambda: one.offer({"step": "train"})):
        with pytest.raises(RunNotFoundError, match="was removed"):
            call()
    assert two.delivery().receiver == {}
    assert not two.delivery().acknowledged


def test_a_submission_that_the_store_refuses_hides_no_result(
    single: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}-go").touch()
    one = single.submit(train, "one", str(tmp_path))
    assert one.wait(60)
    create = store.create

    def fill(location: str, data: bytes, **options: Any) -> bool:
        if location.endswith("/1.json"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(location, data, **options)

    with monkeypatch.context() as full:
        full.setattr(store, "create", fill)
        with pytest.raises(InvalidJobError, match="No space left on device"):
            single.submit(train, "two", str(tmp_path))
    assert set(RunDirectory(one.directory).names()) == {"0.json", one.own.name}, "nothing is left of it"
    for handle in (one, RunHandle.attach(one.directory), single.submit(train, "one", str(tmp_path))):
        assert (handle.status().submission, handle.result(1)) == (0, "one")
    assert single.submit(train, "two", str(tmp_path)).result(60) == "two"


def report_twice(folder: str) -> object:
    import os

    import rankzero.train as rt

    found = rt.get_checkpoint()
    rt.report({}, checkpoint={"of": folder})
    rt.context.await_checkpoint()
    return None if found is None else (found.id, os.path.basename(found.load()["of"]))


def test_a_run_whose_job_is_gone_leaves_its_checkpoints_to_no_other_training(single: Launcher, tmp_path: Path) -> None:
    one = single.submit(report_twice, str(tmp_path / "one"))
    assert one.result(60) is None
    # As an interrupted removal leaves it.
    os.unlink(RunDirectory(one.directory).job_path(0))
    assert single.submit(report_twice, str(tmp_path / "two")).result(60) is None


def test_a_value_is_delivered_from_a_store_that_was_moved(single: Launcher, tmp_path: Path) -> None:
    (tmp_path / "one-go").touch()
    before = single.submit(train, "one", str(tmp_path))
    assert before.wait(60)
    os.rename(tmp_path / "store", tmp_path / "moved")
    handle = single.options(store=tmp_path / "moved").submit(train, "one", str(tmp_path))
    assert (handle.job.submission, handle.result(1)) == (0, "one")
    assert handle.result_ref().uri.startswith(f"{tmp_path}/moved/same/submissions/")
    assert handle.result_ref().load() == "one"


def report_three(lr: float) -> float:
    """Reports three checkpoints, of which the newest is kept."""
    import rankzero.train as rt

    assert rt.get_checkpoint() is None, "another training lends nothing"
    for number in range(3):
        rt.report({"number": number}, checkpoint={"lr": lr, "number": number})
    return lr


def test_a_fresh_training_leaves_the_checkpoints_of_the_one_before(
    launcher: Launcher,
) -> None:
    launcher = launcher.options(num_processes=1, run_id="same")
    assert launcher.run(report_three, 0.1) == 0.1
    handles = [find(launcher)]
    # Another one; then the same one after its delivery.
    for lr in (0.2, 0.2):
        assert launcher.run(report_three, lr) == lr
        handles.append(find(launcher))
    folders = [handle.own.directory for handle in handles if handle]
    assert len(list_committed(folders)) == 3 * len(list_committed(folders[-1:]))
