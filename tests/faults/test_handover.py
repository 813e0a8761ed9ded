"""What a submitter does whose stage, with the driver of the run in it, is lost from sight."""

import json
import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import until

from rankzero import EngineError, Launcher, LocalEngine, RunHandle
from rankzero.driver import DrivenElsewhere, Driver, Handover, Inbox, Placement, Recorder, Restarts, Watch, handover
from rankzero.driver.staged import _await_go as await_go
from rankzero.engines import AgentConfig, AgentGroup, LocalSession, OnEnd
from rankzero.job import Job
from rankzero.pipeline import Follower, LineWritten
from rankzero.run import EVENTS, LINES, RunDirectory, RunStatus
from rankzero.store import files
from rankzero.submit.prepare import prepare
from rankzero.task import staged

WAIT = 30.0


class Group(AgentGroup):
    def cancel(self) -> None:
        self._ended.set()

    def explain(self, error: BaseException) -> EngineError:
        return EngineError(str(error))


class Server:
    """Of an engine that hosts the driver."""

    place, encrypts = "sc://server", False

    def __init__(self) -> None:
        self.answers = True

    def launch(self, num_tasks: int, config: Any, on_end: OnEnd) -> Group:
        self.on_end = on_end
        (Path(config["stage"]["folder"]) / staged.READY).touch()
        return Group()

    def is_usable(self) -> bool:
        return self.answers


def handed(
    tmp_path: Path, server: Server, start_timeout: float = WAIT
) -> tuple[Handover, RunDirectory, Recorder, Inbox]:
    """A stage of one task on that server, what it is of, and what its submitter writes and hears."""
    job = Job("run", "train", 1, 1, False, None, None, start_timeout, {})
    run, inbox = RunDirectory(str(tmp_path / "run")), Inbox()
    assert run.claim(0)
    run.write_submission(job)
    recorder = Recorder(run, 0, 0)
    watch = Watch(run, job, recorder, inbox, leased=False)
    given = Handover(run, job, 0, recorder, server, Placement(1), inbox, watch)  # type: ignore[arg-type]
    return given, run, recorder, inbox


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (RunStatus(state="running", heartbeat=1.0), EngineError, "the stage was lost"),
        (RunStatus(state="running", heartbeat=1.0, result={"uri": "r"}), DrivenElsewhere, None),
    ],
    ids=["running", "certain"],
)
def test_a_stage_that_was_lost_from_sight_is_not_followed_for_ever(
    status: RunStatus,
    error: type[Exception],
    message: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(handover, "HEARTBEAT_TIMEOUT", 0.2)
    caplog.set_level(logging.WARNING)
    server = Server()
    given, run, _, inbox = handed(tmp_path, server)
    with ThreadPoolExecutor(1) as threads:
        followed = threads.submit(given.run, time.monotonic() + WAIT, {}, Restarts(0, 0))
        try:
            folder = run.submission_path(0, "stage-0")
            until(lambda: os.path.exists(os.path.join(folder, staged.GO)), WAIT, "the driver in the stage")
            run.write_status(status)
            # Nothing can be asked just now, and what ended the client's request says no more.
            server.answers = False
            server.on_end(OSError("deadline exceeded"))
            until(lambda: "followed by its heartbeat" in caplog.text, WAIT, "the end of the request")
            server.answers = True
            with pytest.raises(error, match=message):
                followed.result(WAIT)
        finally:
            inbox.interrupt("the test has ended")


def lines_of(run: RunDirectory) -> list[LineWritten]:
    follower = Follower(RunHandle[None].attach(run.directory))
    return [event for event in follower.poll() if isinstance(event, LineWritten)]


def test_what_a_submitter_wrote_to_an_object_store_is_read_under_a_driver_that_writes_no_lines(bucket: str) -> None:
    run = RunDirectory(f"{bucket}/run")
    assert run.claim(0)
    run.write_submission(Job("run", "train", 1, 1, False, None, None, WAIT, {}))
    submitter = Recorder(run, 0, 0)
    submitter.update(state="starting")
    submitter.log(0, ["waiting for slots"])
    submitter.let_go()
    driver = Recorder(run, 0, 0)
    driver.carry_on(run.status())
    try:
        driver.update(state="running")
        # With its first piece of events comes how far its lines can be read.
        until(lambda: run.status().written.get(EVENTS, [0])[0] > 0, WAIT, "a status of the driver")
        assert lines_of(run) == [LineWritten("[0] waiting for slots")]
    finally:
        driver.finish(state="cancelled")


def test_a_submitter_that_was_refused_its_last_lines_does_not_replace_those_of_the_driver_in_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(f"memory://{tmp_path.name}/run")
    assert run.claim(0)
    run.write_submission(Job("run", "train", 1, 1, False, None, None, WAIT, {}))
    through, refused, may_write = files._filesystem, list[str](), threading.Event()
    submitters: list[threading.Thread] = []

    def filesystem(location: str) -> tuple[Any, str]:
        if threading.current_thread() in submitters and location.startswith(run.path(LINES, "")):
            refused.append(location)
            if not may_write.is_set():
                raise ConnectionResetError("the store takes nothing")
        return through(location)

    monkeypatch.setattr(files, "_filesystem", filesystem)
    submitter = Recorder(run, 0, 0)
    submitter.log(0, ["of the submitter"])
    submitter.update(state="starting")
    submitters += [thread for thread in threading.enumerate() if thread.name == "rankzero-flush"]
    # By then it has decided which piece is its own.
    until(lambda: refused, WAIT, "a piece that is refused")
    submitter.let_go()
    driver = Recorder(run, 0, 0)
    driver.carry_on(run.status())
    driver.log(0, ["of the driver"])
    driver.update(state="running")
    until(lambda: run.status().written.get(LINES), WAIT, "lines of the driver")
    may_write.set()
    for thread in submitters:
        thread.join(WAIT)
    driver.finish(state="cancelled")
    assert lines_of(run) == [LineWritten("[0] of the driver")]


def test_a_status_of_the_submitter_that_comes_late_does_not_replace_the_end_of_the_run(tmp_path: Path) -> None:
    server = Server()
    given, run, recorder, inbox = handed(tmp_path, server)
    folder = Path(run.submission_path(0, "stage-0"))
    with ThreadPoolExecutor(1) as threads:
        followed = threads.submit(given.run, time.monotonic() + WAIT, {}, Restarts(0, 0))
        try:
            until((folder / staged.GO).exists, WAIT, "the submitter to let go")
            final = RunStatus(state="succeeded", heartbeat=1.0, result={"uri": "r"}, driver_host="executor")
            staged.put(str(folder), staged.OVER, json.dumps(vars(final)))
            run.write_status(recorder.status)
            server.on_end(None)
            with pytest.raises(DrivenElsewhere):
                followed.result(WAIT)
        finally:
            inbox.interrupt("the test has ended")
    assert run.status() == final


class Cut(Server):
    """Of a store that cannot be asked while the driver in the stage begins."""

    def launch(self, num_tasks: int, config: Any, on_end: OnEnd) -> Group:
        group = super().launch(num_tasks, config, on_end)
        folder = Path(config["stage"]["folder"])
        folder.rename(folder.with_suffix(".cut"))
        # Not a directory: what asks for its names fails.
        folder.touch()
        return group


def test_a_driver_that_began_while_its_store_could_not_be_asked_is_no_start_timeout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given, run, _, inbox = handed(tmp_path, Cut(), start_timeout=0.2)
    folder = Path(run.submission_path(0, "stage-0"))
    with ThreadPoolExecutor(1) as threads:
        deadline = time.monotonic() + 0.2
        followed = threads.submit(given.run, deadline, {}, Restarts(0, 0))
        try:
            until(lambda: "cannot poll the driver" in caplog.text, WAIT, "a poll that fails")
            until(lambda: time.monotonic() > deadline, WAIT, "the deadline")
            folder.unlink()
            folder.with_suffix(".cut").rename(folder)
            until((folder / staged.GO).exists, WAIT, "the submitter to let go")
        finally:
            inbox.interrupt("the test has ended")
        with pytest.raises(DrivenElsewhere):
            followed.result(WAIT)


def test_a_task_that_looks_while_an_attempt_is_written_sees_it_as_a_whole_or_not(tmp_path: Path) -> None:
    seen, done = set[str](), threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.update(name for name in os.listdir(tmp_path) if name.startswith(staged.ATTEMPT))

    looker = threading.Thread(target=look)
    looker.start()
    for number in range(500):
        staged.put(str(tmp_path), f"{staged.ATTEMPT}{number}", "{}")
    done.set()
    looker.join(WAIT)
    assert [name for name in seen if not name.removeprefix(staged.ATTEMPT).isdecimal()] == []


class Unsighted(LocalSession):
    """Of whose stage an executor does not see the run directory, where the driver in the stage did."""

    can_host_driver = True

    def launch(self, num_tasks: int, config: AgentConfig, on_end: OnEnd) -> Any:
        if "stage" not in config:
            return super().launch(num_tasks, config, on_end)
        folder = Path(config["stage"]["folder"])
        (folder / staged.READY).touch()

        def end() -> None:
            until((folder / staged.GO).exists, WAIT, "the submitter")
            on_end(RuntimeError(f"org.apache.spark.SparkException: failed\n{staged.UNSEEN} {folder}\n  at org.apache"))

        threading.Thread(target=end, daemon=True).start()
        return Group()


class UnsightedEngine(LocalEngine):
    def open(self, job: Job) -> LocalSession:
        return Unsighted(job)


def test_a_run_that_comes_back_from_a_stage_is_recorded_to_its_end(launcher: Launcher) -> None:
    request = launcher.options(num_processes=1, engine=UnsightedEngine())._request()
    run, _ = prepare(request, lambda: "done", (), {}, detached=False)
    driver = Driver(run, request.engine, dict(request.env), leased=True)
    threading.Thread(target=driver.run, daemon=True).start()
    handle = RunHandle[str].attach(run.directory)
    assert handle.result(WAIT) == "done"
    assert any("driven from this host, not in its stage: this executor" in line for line in handle.logs(0))


def test_a_driver_in_a_stage_that_cannot_look_for_its_submitter_looks_again(tmp_path: Path) -> None:
    folder = tmp_path / "stage-0"
    # Not a directory: what asks for its names fails.
    folder.touch()
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(await_go, str(folder))
        time.sleep(5 * staged.POLL_INTERVAL)
        assert not waits.done()
        folder.unlink()
        folder.mkdir()
        (folder / staged.GO).touch()
        waits.result(WAIT)
