"""The process that submits a run to be driven in its own stage: whichever process claims the submission drives it."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import until

from rankzero import EngineError, Launcher, LocalEngine, RunCancelledError, RunHandle, StartTimeoutError
from rankzero.driver.driver import Driver
from rankzero.driver.main import Delegation
from rankzero.engines.base import AgentConfig, AgentGroup, OnEnd
from rankzero.engines.connect.stage import StageEngine
from rankzero.engines.local import LocalSession
from rankzero.errors import LOST
from rankzero.host.processes import process_namespace, process_start
from rankzero.job import Job
from rankzero.run.directory import RunDirectory
from rankzero.submit import drivers
from rankzero.submit.prepare import prepare
from rankzero.submit.submission import Written
from rankzero.task.stage import ATTEMPT, OVER, put, run_task, sealed

WAIT = 30.0


class Stage(AgentGroup):
    """A stage that runs until a test ends it."""

    def __init__(self, on_end: OnEnd) -> None:
        super().__init__()
        self.on_end = on_end
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def explain(self, error: BaseException) -> EngineError:
        return EngineError(str(error))


class Cluster(LocalEngine):
    """An engine whose stages may have the driver of a run in them."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "stages", list[Stage]())
        object.__setattr__(self, "configs", list[AgentConfig]())

    stages: list[Stage]
    configs: list[AgentConfig]

    def to_spec(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"kind": "local"}, {"conf": {"spark.ssl.keyPassword": "secret-of-the-engine"}}

    def open(self, job: Job) -> LocalSession:
        cluster = self

        class Session(LocalSession):
            def host_driver(self, num_tasks: int, config: AgentConfig, on_end: OnEnd) -> Stage:
                cluster.configs.append(config)
                cluster.stages.append(Stage(on_end))
                return cluster.stages[-1]

        return Session(job)


class Submitted:
    """A run of one task, and the process that submitted it, in a thread."""

    def __init__(self, folder: Path, pool: ThreadPoolExecutor, start_timeout: float = WAIT) -> None:
        job = Job("run", "train", 1, 1, False, None, None, start_timeout, {}, nonce="first")
        self.job, self.run, self.engine = job, RunDirectory(str(folder / "run")), Cluster()
        assert self.run.claim(0)
        self.run.write_submission(job)
        self.before = self.run.status()
        private: dict[str, Any] = {"env": {"TOKEN": "secret-of-the-user"}, "trackers": None}
        driver = Driver(self.run, job, self.engine, private["env"], leased=True)
        self.inbox = driver.inbox
        self.followed: Future[bool] = pool.submit(Delegation(self.run, job, self.engine, private, driver).run)
        until(lambda: self.engine.stages or self.followed.done(), WAIT, "a stage")

    @property
    def stage(self) -> Stage:
        return self.engine.stages[0]

    def lines(self) -> list[str]:
        return list(RunHandle[None].attach(self.run.directory).logs(0))


@pytest.fixture
def pool() -> Any:
    with ThreadPoolExecutor(4) as made:
        yield made


def test_the_submitter_writes_no_status_of_a_run_that_is_driven_in_its_stage(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    submitted = Submitted(tmp_path, pool)
    assert submitted.run.claim_driver(0)
    submitted.stage.on_end(RuntimeError("the driver was killed"))
    assert submitted.followed.result(WAIT)
    assert submitted.run.status() == submitted.before
    assert submitted.lines() == []


def test_the_submitter_drives_a_run_whose_stage_fails_before_its_driver_has_claimed_it(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    submitted = Submitted(tmp_path, pool)
    submitted.stage.on_end(RuntimeError("an executor refuses secret-of-the-engine"))
    assert not submitted.followed.result(WAIT)
    # The driver of a stage that was thought to have failed finds the submission claimed.
    assert not submitted.run.claim_driver(0)
    assert submitted.lines() == [
        "rankzero: the run is driven from this host, not in its stage: an executor refuses ***"
    ]


def test_the_submitter_of_a_removed_run_writes_nothing_into_the_next_one(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    submitted = Submitted(tmp_path, pool)
    shutil.rmtree(submitted.run.directory)
    assert submitted.run.claim(0)
    submitted.run.write_submission(replace(submitted.job, nonce="second"))
    submitted.stage.on_end(RuntimeError("an executor refuses it"))
    submitted.followed.result(WAIT)
    assert submitted.run.job().nonce == "second"
    assert submitted.lines() == []


def cancel(submitted: Submitted) -> None:
    submitted.run.request_cancel(0)


def interrupt(submitted: Submitted) -> None:
    submitted.inbox.interrupt("the driver got SIGTERM")


@pytest.mark.parametrize("end", [cancel, interrupt])
def test_a_run_that_is_cancelled_before_its_stage_begins_is_not_driven_there(
    tmp_path: Path, pool: ThreadPoolExecutor, end: Callable[[Submitted], None]
) -> None:
    submitted = Submitted(tmp_path, pool)
    end(submitted)
    with pytest.raises(RunCancelledError):
        submitted.followed.result(WAIT)
    assert submitted.stage.is_cancelled
    assert not submitted.run.claim_driver(0)


def test_a_stage_that_does_not_begin_in_time_is_cancelled(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    submitted = Submitted(tmp_path, pool, start_timeout=2.0)
    with pytest.raises(StartTimeoutError, match="the stage of 1 tasks did not start within"):
        submitted.followed.result(WAIT)
    assert submitted.stage.is_cancelled
    assert not submitted.run.claim_driver(0)


# The submitter of a stage that does not begin. The store takes no claim, so whether the stage has the run is unknown.
UNCLAIMED = """
import sys
from rankzero.driver.main import drive
from rankzero.run.directory import RunDirectory
from tests.faults.test_delegation import Cluster

class Full(RunDirectory):
    def claim_driver(self, submission):
        raise OSError("no space left on device")

class Engine(Cluster):
    def can_host_driver(self, run, job):
        return True

drive(Full(sys.argv[1]), 0, lambda: {"env": {}, "trackers": None}, engine=Engine())
"""


def test_a_submitter_that_cannot_claim_a_run_does_not_drive_it(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "run"))
    assert run.claim(0)
    run.write_submission(Job("run", "train", 1, 1, False, None, None, 0.2, {}))
    before = run.status()
    submitter = subprocess.run([sys.executable, "-c", UNCLAIMED, run.directory], capture_output=True, text=True)
    assert submitter.returncode == 1
    assert "no space left on device" in submitter.stderr
    assert run.status() == before


def test_a_submitter_that_must_exit_leaves_the_stage_running(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    submitted = Submitted(tmp_path, pool)
    assert submitted.run.claim_driver(0)
    interrupt(submitted)
    assert submitted.followed.result(WAIT)
    assert not submitted.stage.is_cancelled


def test_a_stage_that_does_not_end_after_its_driver_is_cancelled(
    tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.04")
    submitted = Submitted(tmp_path, pool)
    assert submitted.run.claim_driver(0)
    put(submitted.engine.configs[0]["stage"]["folder"], OVER, "")
    assert submitted.followed.result(WAIT)
    assert submitted.stage.is_cancelled


def test_no_file_of_a_stage_holds_a_secret(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    submitted = Submitted(tmp_path, pool)
    stage = submitted.engine.configs[0]["stage"]
    engine = StageEngine(stage["folder"], 1, "127.0.0.1", stage["secret"], stage["place"], stage["encrypts"])
    secret = "ab" * 32
    config = {"attempt": 3, "secret": secret, "env": {"TOKEN": "secret-of-the-user"}}
    ended = threading.Event()
    engine.open(submitted.run.job()).launch(1, config, lambda _: ended.set())
    for path in Path(submitted.run.directory).rglob("*"):
        if path.is_file():
            assert not any(word in path.read_text() for word in (secret, stage["secret"], "secret-of-the-user")), path
    settings = json.loads(Path(stage["folder"], f"{ATTEMPT}3").read_text())
    assert sealed(settings["secret"], stage["secret"], 3) == secret
    assert sealed(settings["secret"], stage["secret"], 4) != secret
    put(stage["folder"], "ended-3-0", "")
    assert ended.wait(WAIT)
    assert submitted.run.claim_driver(0)
    submitted.stage.on_end(None)
    assert submitted.followed.result(WAIT)


def test_a_task_that_does_not_see_the_run_directory_fails(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("another")
    stage = {"directory": str(tmp_path), "token": "this", "folder": str(tmp_path)}
    with pytest.raises(RuntimeError, match="an executor does not see"):
        run_task({"task": 0, "stage": stage})


def test_a_task_reads_a_file_of_its_stage_as_a_whole_or_not(tmp_path: Path) -> None:
    seen, done = set[str](), threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.update(name for name in os.listdir(tmp_path) if name.startswith(ATTEMPT))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(500):
        put(str(tmp_path), f"{ATTEMPT}{number}", "{}")
    done.set()
    reader.join(WAIT)
    assert [name for name in seen if not name.removeprefix(ATTEMPT).isdecimal()] == []


@pytest.mark.parametrize("restarts", [0, 1])
def test_the_error_of_a_stage_without_a_driver_counts_as_that_of_the_first_attempt(
    launcher: Launcher, restarts: int
) -> None:
    request = launcher.options(num_processes=1, max_restarts=restarts, engine=LocalEngine())._request()
    run, job = prepare(request, lambda: "done", (), {}, Written(), detached=False)
    assert job
    driver = Driver(run, job, request.engine, dict(request.env), leased=True)
    driver.run(EngineError("the server was lost", cause=LOST))
    handle = RunHandle[str].attach(run.directory)
    if restarts:
        assert handle.result(WAIT) == "done"
        assert handle.status().attempt == 1
    else:
        with pytest.raises(EngineError, match="the server was lost"):
            handle.result(WAIT)


def test_a_stage_that_waits_for_slots_is_reported_to_followers(
    tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.01")
    submitted = Submitted(tmp_path, pool)
    until(submitted.lines, WAIT, "a line about the wait")
    assert submitted.run.claim_driver(0)
    submitted.stage.on_end(None)
    assert submitted.followed.result(WAIT)
    assert "to begin 1 tasks, for" in submitted.lines()[0]


def test_a_reader_detects_the_death_of_a_driver_in_its_stage_while_the_submitter_lives(launcher: Launcher) -> None:
    request = launcher.options(num_processes=1, engine=LocalEngine())._request()
    run, job = prepare(request, lambda: "done", (), {}, Written(), detached=False)
    assert job
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with drivers.DriverProcess(command) as submitter, subprocess.Popen(command) as driver:
        try:
            handle = RunHandle[str](run.directory, submitter, job=job)
            facts = {"driver_pid": driver.pid, "driver_start": process_start(driver.pid)}
            status = replace(run.status(), state="running", driver_namespace=process_namespace(), **facts)
            run.write_status(replace(status, heartbeat=time.time(), driver_host="here"))
            assert handle.status().state == "running"
            driver.kill()
            driver.wait()
            assert handle.status().state == "failed"
        finally:
            submitter.kill()
            driver.kill()
