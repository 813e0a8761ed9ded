"""The process that submits a run to be driven in its own stage: whichever process claims the submission drives it."""

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import until
from tests.runs import submitted

from rankzero import EngineError, Launcher, LocalEngine, RunCancelledError, RunHandle, StartTimeoutError
from rankzero.driver.driver import Driver
from rankzero.driver.main import Delegation
from rankzero.engines.base import AgentConfig, AgentGroup, OnEnd
from rankzero.engines.connect.stage import StageEngine
from rankzero.engines.local import LocalSession
from rankzero.errors import LOST
from rankzero.job import Job
from rankzero.run.directory import Submission
from rankzero.run.status import RunStatus
from rankzero.submit.start import Submitter
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


@dataclass(frozen=True)
class Cluster(LocalEngine):
    """An engine whose stages may have the driver of a run in them."""

    stages: list[Stage] = field(default_factory=list)
    configs: list[AgentConfig] = field(default_factory=list)

    def to_spec(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"kind": "local"}, {"conf": {"spark.ssl.keyPassword": "secret-of-the-engine"}}

    def open(self, job: Job, env: Mapping[str, str]) -> LocalSession:
        cluster = self

        class Session(LocalSession):
            def host_driver(self, num_tasks: int, config: AgentConfig, on_end: OnEnd) -> Stage:
                cluster.configs.append(config)
                cluster.stages.append(Stage(on_end))
                return cluster.stages[-1]

        return Session(job)


async def follow(driver: Driver, delegation: Delegation) -> bool:
    """Does what the driver does until it knows whether it drives the run."""
    await driver.watch.start()
    try:
        found = await delegation.run()
    finally:
        driver.watch.end()
    if isinstance(found, Exception):
        raise found
    return found


class Submitted:
    """A run of one task, and the process that submitted it, in a thread."""

    def __init__(self, folder: Path, pool: ThreadPoolExecutor, start_timeout: float = WAIT) -> None:
        facts = {"start_timeout": start_timeout, "nonce": "ab"}
        self.own, self.engine = submitted(str(folder / "run"), **facts), Cluster()
        private: dict[str, Any] = {"env": {"TOKEN": "secret-of-the-user"}, "trackers": None}
        driver = Driver(self.own, self.engine, private["env"], leased=True)
        self.watch = driver.watch
        delegation = Delegation(self.own, private, driver)
        self.followed: Future[bool] = pool.submit(lambda: asyncio.run(follow(driver, delegation)))
        until(lambda: self.engine.stages or self.followed.done(), WAIT, "a stage")

    @property
    def stage(self) -> Stage:
        return self.engine.stages[0]

    def lines(self) -> list[str]:
        return list(RunHandle[None](self.own.run.directory).logs(0))


@pytest.fixture
def pool() -> Any:
    with ThreadPoolExecutor(4) as made:
        yield made


def test_the_submitter_drives_a_run_whose_stage_fails_before_its_driver_has_claimed_it(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    run = Submitted(tmp_path, pool)
    run.stage.on_end(RuntimeError("an executor refuses secret-of-the-engine"))
    assert not run.followed.result(WAIT)
    # The driver of a stage that was thought to have failed finds the submission claimed.
    assert not run.own.claim_driver()
    lines = until(run.lines, WAIT, "a line, which a thread writes")
    assert lines == ["rankzero: the run is driven from this host, not in its stage: an executor refuses ***"]


def cancel(run: Submitted) -> None:
    run.own.request_cancel()


def interrupt(run: Submitted) -> None:
    run.watch.interrupt("the driver got SIGTERM")


def end_elsewhere(run: Submitted) -> None:
    Submission(run.own.run, run.own.job).finish(RunStatus("failed"))


@pytest.mark.parametrize("end", [cancel, interrupt, end_elsewhere])
def test_a_run_that_is_cancelled_before_its_stage_begins_is_not_driven_there(
    tmp_path: Path, pool: ThreadPoolExecutor, end: Callable[[Submitted], None]
) -> None:
    run = Submitted(tmp_path, pool)
    end(run)
    with pytest.raises(RunCancelledError):
        run.followed.result(WAIT)
    assert run.stage.is_cancelled
    assert not run.own.claim_driver()


def test_a_stage_that_does_not_begin_in_time_is_cancelled(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    run = Submitted(tmp_path, pool, start_timeout=2.0)
    with pytest.raises(StartTimeoutError, match="the stage of 1 tasks did not start within"):
        run.followed.result(WAIT)
    assert run.stage.is_cancelled
    assert not run.own.claim_driver()


def test_a_cancel_is_heard_while_the_status_of_the_submitter_hangs(
    tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(own: Submission, _: RunStatus) -> None:
        own.request_cancel()
        threading.Event().wait(WAIT)

    monkeypatch.setenv("RANKZERO_TIME_SCALE", "10")
    monkeypatch.setattr(Submission, "write_status", hang)
    with pytest.raises(RunCancelledError):
        Submitted(tmp_path, pool).followed.result(WAIT)


def test_a_submitter_that_must_exit_leaves_the_stage_running(
    tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "20")
    run = Submitted(tmp_path, pool)
    assert run.own.claim_driver()
    interrupt(run)
    with pytest.raises(TimeoutError):
        # Followers take it for the driver.
        run.followed.result(1.0)
    run.own.write_status(RunStatus("starting"))
    assert run.followed.result(WAIT)
    assert (run.own.status(), run.lines()) == (RunStatus("starting"), [])
    assert not run.stage.is_cancelled


def test_a_stage_that_does_not_end_after_its_driver_is_cancelled(
    tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.04")
    run = Submitted(tmp_path, pool)
    assert run.own.claim_driver()
    put(run.engine.configs[0]["stage"]["folder"], OVER, "")
    assert run.followed.result(WAIT)
    assert run.stage.is_cancelled


def test_no_file_of_a_stage_holds_a_secret(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    run = Submitted(tmp_path, pool)
    stage = run.engine.configs[0]["stage"]
    engine = StageEngine(stage["folder"], 1, "127.0.0.1", stage["secret"], stage["place"], stage["encrypts"])
    secret = "ab" * 32
    config = {"attempt": 3, "secret": secret, "env": {"TOKEN": "secret-of-the-user"}}
    ended = threading.Event()
    engine.open(run.own.job, {}).launch(1, config, lambda _: ended.set())
    for path in Path(run.own.run.directory).rglob("*"):
        if path.is_file():
            assert not any(word in path.read_text() for word in (secret, stage["secret"], "secret-of-the-user")), path
    settings = json.loads(Path(stage["folder"], f"{ATTEMPT}3").read_text())
    assert sealed(settings["secret"], stage["secret"], 3) == secret
    assert sealed(settings["secret"], stage["secret"], 4) != secret
    put(stage["folder"], "ended-3-0", "")
    assert ended.wait(WAIT)
    assert run.own.claim_driver()
    run.stage.on_end(None)
    assert run.followed.result(WAIT)


def test_a_task_that_does_not_see_the_run_directory_fails(tmp_path: Path) -> None:
    stage = {"directory": str(tmp_path), "folder": str(tmp_path / "stage")}
    with pytest.raises(RuntimeError, match="an executor does not see"):
        run_task({"task": 0, "stage": stage})


@pytest.mark.parametrize("restarts", [0, 1])
def test_the_error_of_a_stage_without_a_driver_counts_as_that_of_the_first_attempt(
    launcher: Launcher, restarts: int
) -> None:
    request = launcher.options(num_processes=1, max_restarts=restarts, engine=LocalEngine())._request()
    submitter = Submitter(request, lambda: "done", (), {}, detached=False)
    submitter.submit()
    own = submitter.own
    assert own
    assert own.claim_driver()
    driver = Driver(own, request.engine, dict(request.env), leased=True)

    async def refuse() -> Exception:
        return EngineError("the server was lost", cause=LOST)

    driver.run(refuse)
    handle = RunHandle[str].attach(own.run.directory)
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
    # No stage fails because its followers are told less.
    monkeypatch.setattr(Submission, "write_status", lambda *_: tmp_path.write_text("a directory refuses it"))
    run = Submitted(tmp_path, pool)
    until(run.lines, WAIT, "a line about the wait")
    assert run.own.claim_driver()
    run.stage.on_end(None)
    assert run.followed.result(WAIT)
    assert "to begin 1 tasks, for" in run.lines()[0]
