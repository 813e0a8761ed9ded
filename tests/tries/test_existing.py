"""A submission follows the run that it has compared with its own training, whatever is submitted meanwhile."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import until
from tests.runs import submitted
from tests.tries.identities import identity_by
from tests.tries.test_durable import Try

from rankzero import EngineError, InvalidJobError, Launcher, RunCancelledError
from rankzero.host.processes import describe_process
from rankzero.pipeline import open_run
from rankzero.run.directory import RunDirectory, Submission
from rankzero.run.observer import CANCEL
from rankzero.run.status import RunStatus
from rankzero.submit import existing

LOG = logging.getLogger(__name__)
OLD = EngineError("the old failure").to_json()


class Slow:
    """An argument with a checksum that takes long: another process submits the run meanwhile."""

    def __init__(self, meanwhile: Callable[[], object] = bool) -> None:
        self.meanwhile = meanwhile

    def __reduce__(self) -> tuple[type, tuple[str]]:
        self.meanwhile()
        return (str, ("data",))


@pytest.fixture
def single(launcher: Launcher) -> Launcher:
    return launcher.options(num_processes=1, run_id="one")


@pytest.fixture
def run(single: Launcher) -> RunDirectory:
    """The directory of a run whose submission 0, of the training `len` of `Slow`, has failed."""
    run = RunDirectory(f"{single.store}/one")
    submit(run, identity_by(single, len, (Slow(),), {}), 0, RunStatus("failed", error=OLD, ended=time.time()))
    return run


def submit(
    run: RunDirectory, training: dict[str, str], number: int, status: RunStatus, owner: dict[str, Any] | None = None
) -> Submission:
    """Submits a training, and writes the status of its driver."""
    facts = {"identity_parts": training, "generation": "scheduled"}
    status = replace(status, attempt=number, heartbeat=time.time(), driver_host="host")
    return submitted(
        run.directory, status, submission=number, first_attempt=number, owner=owner, nonce=f"{number:016x}", **facts
    )


def of_driver(state: str, pid: int, **facts: Any) -> RunStatus:
    process = {f"driver_{name}": value for name, value in describe_process(pid).items()}
    return RunStatus(state, **process, **facts)


class Meanwhile:
    """Submits a run once."""

    def __init__(self, run: RunDirectory, training: dict[str, str], status: RunStatus) -> None:
        self.act: Callable[[], None] | None = lambda: submit(run, training, 1, status)

    def __call__(self) -> None:
        act, self.act = self.act, None
        if act:
            act()


@pytest.mark.parametrize("state", ["running", "succeeded"])
def test_a_try_follows_the_submission_that_came_while_it_computed_a_checksum(
    single: Launcher, run: RunDirectory, state: str
) -> None:
    path = Path(run.path("submissions", f"1-{1:016x}", "result", "value-1.json"))
    path.parent.mkdir(parents=True)
    path.write_text("7")
    value: dict[str, Any] = {"value": [7], "result": {"uri": str(path)}}
    status = of_driver(state, os.getpid(), **(value if state == "succeeded" else {}))
    meanwhile = Meanwhile(run, identity_by(single, len, (Slow(),), {}), status)
    with open_run(single, len, (Slow(meanwhile),), {}, Try("scheduled"), LOG) as handle:
        assert handle.attached
        assert handle.status().state == state
        own = handle.own
        own.write_status(replace(own.status(), state="succeeded", **value))
        assert handle.result() == 7


def test_a_run_whose_newest_folder_was_deleted_goes_on(single: Launcher, run: RunDirectory) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as owner:
        gone = describe_process(owner.pid)
    submit(run, identity_by(single, len, (Slow(),), {}), 1, RunStatus("running"), gone)
    shutil.rmtree(run.current().directory)
    assert single.submit(len, Slow()).result() == 4


def test_a_store_that_fails_while_the_next_submission_is_made_is_named(single: Launcher, run: RunDirectory) -> None:
    place = Path(run.current().path("checkpoints"))
    place.rmdir()
    place.touch()
    with pytest.raises(InvalidJobError, match="store cannot be .*checkpoints"):
        single.submit(len, Slow())


@pytest.fixture
def driver() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends when its run is cancelled."""
    ends = f"signal.signal({int(CANCEL)}, lambda *_: os._exit(0)); print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", f"import os, signal, time; {ends}"], stdout=subprocess.PIPE) as driver:
        assert driver.stdout
        driver.stdout.read(1)
        yield driver
        driver.kill()


def test_another_training_that_came_while_a_try_computed_a_checksum_is_ended(
    single: Launcher, run: RunDirectory, driver: subprocess.Popen[bytes]
) -> None:
    meanwhile = Meanwhile(run, {"train": "other"}, of_driver("running", driver.pid))
    with open_run(single, len, (Slow(meanwhile),), {}, Try("cleared"), LOG) as handle:
        assert not handle.attached
        assert handle.result(60) == 4
    job = run.job_of(1)
    assert job
    request = Submission(run, job).cancel_request()
    assert request
    assert request["reason"] == "another training was submitted in its place"


def end_late(folder: str) -> str:
    """Handles SIGTERM until the file ``end`` is there. Returns immediately if it is there already."""
    end = Path(folder, "end")

    def stop(*_: object) -> None:
        until(end.exists, 60, "the end")
        sys.exit(1)

    signal.signal(signal.SIGTERM, stop)
    Path(folder, "begun").touch()
    until(end.exists, 60, "the end")
    return "resumed"


def test_a_try_that_comes_while_a_run_cancels_itself_waits_and_resumes_it(
    single: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    single = single.options(stop_grace=60.0)
    handle = single.submit(end_late, str(tmp_path))
    until((tmp_path / "begun").exists, 60, "the training")
    driver = until(lambda: handle.own.status().driver_pid, 60, "its driver")
    # As a host does that is shut down.
    os.kill(driver, signal.SIGTERM)
    until(lambda: handle.own.status().cancelling, 60, "the driver's decision")

    await_end = existing.await_end

    def end_when_awaited(own: Submission) -> None:
        (tmp_path / "end").touch()
        await_end(own)

    monkeypatch.setattr(existing, "await_end", end_when_awaited)
    with open_run(single, end_late, (str(tmp_path),), {}, Try("scheduled"), LOG) as again:
        assert not again.attached
        assert again.result(60) == "resumed"
    with pytest.raises(RunCancelledError, match="the driver got SIGTERM"):
        handle.result()
