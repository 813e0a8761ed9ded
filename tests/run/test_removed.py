"""A run directory that a user removes by hand, while its run lives, and in which the run id is submitted again."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import until, wait_until_gone

from rankzero import Launcher, RunHandle, RunNotFoundError
from rankzero.job import Job
from rankzero.run import CurrentStatus, RunDirectory, RunStatus, owns


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


@pytest.mark.parametrize("submissions", [1, 2], ids=["first", "second"])
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
        with pytest.raises(RunNotFoundError, match="was removed, and another one was submitted under its name"):
            old.result(10)


def _removes(directory: Path) -> bool:
    """Removes a directory into which processes still write; True if something is left."""
    shutil.rmtree(directory, ignore_errors=True)
    return directory.exists()


def job(submission: int, nonce: str) -> Job:
    facts: dict[str, Any] = {"use_gpu": False, "backend": None, "timeout": None, "start_timeout": 1.0, "engine": {}}
    made = Job("one", "train", 1, 1, **facts)
    return replace(made, submission=submission, nonce=nonce)


def submit(run: RunDirectory, submission: int, nonce: str) -> None:
    assert run.claim(submission)
    run.write_submission(job(submission, nonce))


def test_a_status_of_another_submission_is_not_read(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "run"))
    submit(run, 0, "new")
    reader = CurrentStatus(run)
    run.write_status(RunStatus(state="succeeded", nonce="old"))
    assert reader.read().state == "pending"
    run.write_status(RunStatus(state="running", nonce="new"))
    assert reader.read().state == "running"
    for submission in (0, 3):
        run.write_status(RunStatus(state="succeeded", submission=submission, nonce="old"))
        assert reader.read().state == "running"
    # An earlier version of rankzero writes none.
    run.write_status(RunStatus(state="failed"))
    assert reader.read().state == "failed"
    # The next submission begins with its status.
    assert run.claim(1)
    run.write_status(RunStatus(state="pending", submission=1, nonce="next"))
    assert reader.read().submission == 1


def test_a_driver_owns_its_directory_until_it_is_another_run_s(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "run"))
    submit(run, 0, "zero")
    submit(run, 1, "one")
    assert owns(run, 1, "one")
    assert not owns(run, 0, "zero")
    # A submitter that was held up has written its job over a later one.
    run.restore(0)
    assert owns(run, 1, "one")
    assert run.job().nonce == "one"
    shutil.rmtree(run.directory)
    assert not owns(run, 1, "one")
    submit(run, 0, "new")
    for submission, nonce in ((0, "zero"), (1, "one")):
        assert not owns(run, submission, nonce)
    assert run.job().nonce == "new"
