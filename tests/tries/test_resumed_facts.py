"""What a training has reported and set before it resumes: metrics stay, and a value that is lost is an error."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import pytest

import rankzero.train as rt
from rankzero import Launcher, ResultError, RunHandle, WorkerFailedError
from rankzero.run.directory import RunDirectory

EPOCHS = 3


def train(folder: str) -> str:
    """Fails behind its last epoch, once."""
    checkpoint = rt.get_checkpoint()
    for epoch in range(checkpoint.load()["epoch"] if checkpoint else 0, EPOCHS):
        rt.report({"accuracy": 0.9 + epoch / 100, "epoch": epoch}, checkpoint={"epoch": epoch + 1})
    if not checkpoint:
        rt.report({"exported": False})
        raise RuntimeError("the export failed")
    return "exported"


@pytest.fixture
def failed(launcher: Launcher, tmp_path: Path) -> Launcher:
    """A launcher whose run has failed behind its last epoch."""
    resuming = Launcher(1, store=launcher.store, run_id="resumed")
    with pytest.raises(WorkerFailedError, match="the export failed"):
        resuming.run(train, str(tmp_path))
    return resuming


REPORTED = {"accuracy": 0.92, "epoch": 2}


def test_a_training_that_resumes_keeps_the_metrics_that_it_has_reported(failed: Launcher, tmp_path: Path) -> None:
    before = RunHandle.attach(f"{failed.store}/resumed").status().metrics
    assert before == {**REPORTED, "exported": False}
    handle = failed.submit(train, str(tmp_path))
    assert handle.result() == "exported"
    assert handle.status().metrics == before
    assert handle.result_ref().summary["metrics"] == before
    # Another training of this name begins without them.
    assert failed.submit(lambda: None).wait()
    assert RunHandle.attach(handle.directory).status().metrics == {}


def test_metrics_of_a_checkpoint_that_the_last_status_lacks_are_kept(failed: Launcher, tmp_path: Path) -> None:
    """A driver that is killed between the commit and its next status leaves this behind."""
    own = RunDirectory(f"{failed.store}/resumed").current()
    own.write_status(dataclasses.replace(own.status(), metrics={"epoch": 0}, checkpoint="0000-000000"))
    handle = failed.submit(train, str(tmp_path))
    assert handle.result() == "exported"
    assert handle.status().metrics == REPORTED


def test_checkpoints_of_a_delivered_training_give_no_metrics(failed: Launcher, tmp_path: Path) -> None:
    handle = failed.submit(train, str(tmp_path))
    handle.result()
    handle.acknowledge()

    def other(flag: str) -> None:
        rt.report({"loss": 0.4})
        if not Path(flag).exists():
            Path(flag).touch()
            raise RuntimeError("before its first checkpoint")

    flag = str(tmp_path / "failed")
    with pytest.raises(WorkerFailedError, match="before its first checkpoint"):
        failed.run(other, flag)
    assert failed.submit(other, flag).wait()
    assert RunHandle.attach(handle.directory).status().metrics == {"loss": 0.4}


def train_and_set(flag: str, *, sets_again: bool) -> None:
    """Sets its value in its first epoch, and is killed after the second."""
    checkpoint = rt.get_checkpoint()
    state = checkpoint.load() if checkpoint else {"epoch": 0, "best": None}
    if sets_again and state["best"] is not None:
        rt.set_result(state["best"])
    for epoch in range(state["epoch"], EPOCHS):
        if epoch == 0:
            state["best"] = epoch
            rt.set_result(state["best"])
        state["epoch"] = epoch + 1
        rt.report({"epoch": epoch}, checkpoint=dict(state))
        rt.context.await_checkpoint()
        if epoch == 1 and rt.get_context().rank == 0 and not Path(flag).exists():
            Path(flag).touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_value_that_was_set_before_a_restart_is_not_lost_silently(launcher: Launcher, tmp_path: Path) -> None:
    restarting = Launcher(2, store=launcher.store, max_restarts=1)
    with pytest.raises((ResultError, WorkerFailedError), match="the run has lost its value"):
        restarting.run(train_and_set, str(tmp_path / "killed"), sets_again=False)
    assert restarting.run(train_and_set, str(tmp_path / "killed too"), sets_again=True) == 0


def test_a_value_that_is_returned_needs_no_other(launcher: Launcher, tmp_path: Path) -> None:
    flag = str(tmp_path / "killed")

    def returning() -> str:
        train_and_set(flag, sets_again=False)
        return "returned"

    assert Launcher(1, store=launcher.store, max_restarts=1).run(returning) == "returned"
