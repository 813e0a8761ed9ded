"""Drivers that follow each other within one submission, as pods of a Kubernetes Job do: processes of this machine."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import ROOT, until

from rankzero import Launcher, RunHandle
from rankzero.driver import succession
from rankzero.driver.policy import Restarts
from rankzero.driver.status import StatusWriter
from rankzero.engines.local import LocalEngine
from rankzero.errors import LOST, EngineError
from rankzero.job import Job
from rankzero.run.directory import RunDirectory, RunStatus
from rankzero.run.liveness import dead_after

WAIT = 60.0

# Silence of fifteen seconds is for clusters; a busy machine may well hold a heartbeat up for one.
PROGRAM = """
import sys
from rankzero.driver import recorder
from rankzero.run import liveness
recorder.HEARTBEAT_INTERVAL = 0.5
liveness.DRIVER_DEAD_AFTER, liveness._MISSED = 3.0, 1.0
from rankzero.driver.main import drive
from rankzero.run.directory import RunDirectory
drive(RunDirectory(sys.argv[1]), 0, lambda: {"env": {}, "engine": {}}, replaceable=True)
"""


@dataclass(frozen=True)
class Elsewhere(LocalEngine):
    """This machine, with a driver that the test starts."""

    drives_elsewhere = True

    def start_driver(self, run: Any, private: Any) -> None:
        """Leaves that to the test."""


@dataclass
class Pods:
    """The driver's processes, one after the other."""

    directory: str = ""
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> subprocess.Popen[bytes]:
        self.running.append(subprocess.Popen([sys.executable, "-c", PROGRAM, self.directory], cwd=ROOT))
        return self.running[-1]


@pytest.fixture
def pods() -> Iterator[Pods]:
    made = Pods()
    yield made
    for pod in made.running:
        pod.kill()
        pod.wait()


def steps(go: str, preempted: int = 0) -> list[Any]:
    import os
    import signal
    import time

    import rankzero.train as rt

    before, attempt = rt.get_checkpoint(), rt.get_context().attempt
    if attempt < preempted:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    if before is None:
        rt.report({"step": 1}, checkpoint={"step": 1})
    while not os.path.exists(go):
        time.sleep(0.02)
    return [before and before.load()["step"], attempt]


def submitted(launcher: Launcher, pods: Pods, tmp_path: Path, preempted: int = 0, **options: Any) -> RunHandle[Any]:
    """A run whose first driver has a checkpoint, after so many preemptions."""
    launcher = launcher.options(num_processes=1, engine=Elsewhere(), **options)
    handle = launcher.submit(steps, str(tmp_path / "go"), preempted)
    pods.directory = handle.directory
    pods.start()
    until(lambda: RunDirectory(handle.directory).status().checkpoint, WAIT, "a checkpoint")
    return handle


def test_the_next_driver_goes_on_from_the_last_checkpoint(launcher: Launcher, pods: Pods, tmp_path: Path) -> None:
    handle = submitted(launcher, pods, tmp_path, max_restarts=1)
    pods.running[0].kill()
    pods.running[0].wait()
    (tmp_path / "go").touch()
    pods.start()
    assert handle.result(timeout=WAIT) == [1, 1]
    assert pods.running[1].wait(WAIT) == 0
    [restart] = [event for event in handle.events() if event["type"] == "restart"]
    assert "the driver of the run was lost" in restart["what"]
    # Another one, of a run that has ended, has nothing to do.
    assert pods.start().wait(WAIT) == 0
    assert handle.status().state == "succeeded"


def test_what_was_preempted_before_is_no_restart_to_the_next_driver(
    launcher: Launcher, pods: Pods, tmp_path: Path
) -> None:
    handle = submitted(launcher, pods, tmp_path, preempted=1, max_restarts=1, max_preemptions=1)
    pods.running[0].kill()
    pods.running[0].wait()
    (tmp_path / "go").touch()
    pods.start()
    assert handle.result(timeout=WAIT) == [1, 2]
    assert handle.status().preemptions == 1


def test_a_signal_ends_a_driver_and_not_the_run(launcher: Launcher, pods: Pods, tmp_path: Path) -> None:
    handle = submitted(launcher, pods, tmp_path)
    pods.running[0].terminate()
    assert pods.running[0].wait(WAIT) != 0, "0 is the end of a run to whoever starts the next one"
    assert handle.status().state == "running", "a follower waits for the next one"
    assert pods.start().wait(WAIT) == 0
    with pytest.raises(EngineError, match="driver of the run was lost.*max_restarts=0 allows no further"):
        handle.result(timeout=WAIT)


def test_the_next_driver_waits_while_the_one_before_lives(launcher: Launcher, pods: Pods, tmp_path: Path) -> None:
    handle = submitted(launcher, pods, tmp_path, max_restarts=1)
    second = pods.start()
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(5)
    (tmp_path / "go").touch()
    assert handle.result(timeout=WAIT) == [None, 0]
    assert [pod.wait(WAIT) for pod in pods.running] == [0, 0]


def job(**options: Any) -> Job:
    return Job("run", "train", 1, 1, False, None, None, 600.0, {}, **options)


@pytest.mark.parametrize(
    ("max_restarts", "attempt", "preemptions", "found"),
    [
        (2, 0, 0, succession.Start(1, Restarts(2, 3, restarts=1), 1, 600.0)),
        (2, 1, 0, succession.Start(2, Restarts(2, 3, restarts=2), 1, 600.0)),
        (2, 3, 2, succession.Start(4, Restarts(2, 3, restarts=2, preemptions=2), 1, 600.0)),
        (2, 2, 0, None),
        (2, 4, 2, None),
        (0, 0, 0, None),
    ],
)
def test_a_lost_driver_is_a_lost_attempt(
    max_restarts: int, attempt: int, preemptions: int, found: succession.Start | None
) -> None:
    asked = job(max_restarts=max_restarts, max_preemptions=3)
    status = RunStatus(attempt=attempt, preemptions=preemptions, driver_host="pod-0")
    start = succession.after(asked, status, 1)
    if found is None:
        assert isinstance(start, EngineError)
        assert start.cause == LOST
        return
    assert isinstance(start, succession.Start)
    assert "on pod-0" in str(start.lost)
    assert replace(start, lost=None) == found


def test_a_driver_whose_place_was_taken_writes_no_more(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "run"))
    assert run.claim(0)
    run.write_submission(job())
    writer = StatusWriter(run, RunStatus(), number=0)
    assert run.claim_driver(0)
    assert run.claim_driver(0, 1)
    assert not run.claim_driver(0, 1)
    writer.change(state="succeeded")
    assert writer.await_written(WAIT)
    assert writer.superseded
    assert run.status().state == "pending"


def test_readers_wait_for_the_next_driver() -> None:
    assert dead_after(RunStatus(patience=600.0)) == 600.0
    assert dead_after(RunStatus()) == 15.0
