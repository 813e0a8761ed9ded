"""A driver whose process can be queried is alive as long as the kernel says so, whatever the store takes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import ROOT, until

from rankzero import EngineError, Launcher, LocalEngine, RunHandle
from rankzero.host.processes import process_namespace, process_start, this_thread
from rankzero.run import observer
from rankzero.run.directory import RunDirectory, Submission
from rankzero.run.observer import process_lives
from rankzero.run.status import RunStatus
from rankzero.submit import drivers

WAIT = 60.0


def wait_for(go: str) -> str:
    print("training", flush=True)
    while not Path(go).exists():
        time.sleep(0.02)
    return "trained"


@pytest.fixture
def full_store(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A store that takes no status from the moment its list is emptied; limits of time that are soon over."""
    room = [0.0]
    refused: list[float] = []
    write = Submission.write_status

    def write_if_there_is_room(run: Submission, status: RunStatus) -> None:
        if not room and not status.certain:
            refused.append(time.time())
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(run, status)

    monkeypatch.setattr(Submission, "write_status", write_if_there_is_room)
    monkeypatch.setattr(observer, "dead_after", lambda _: 0.5)
    monkeypatch.setattr(drivers, "CANCEL_TIMEOUT", lambda: 0.5)
    return room


@pytest.mark.soak
def test_a_store_that_takes_nothing_costs_a_run_neither_its_owner_nor_its_value(
    launcher: Launcher, tmp_path: Path, full_store: list[float]
) -> None:
    values: list[Any] = []

    def call() -> None:
        try:
            values.append(launcher.options(run_id="run", stop_grace=0.5).run(wait_for, str(tmp_path / "go")))
        except Exception as error:
            values.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    directory = RunDirectory(str(tmp_path / "store" / "run"))
    until(lambda: directory.find_job() and directory.current().status().state == "running", WAIT, "ranks")
    run = directory.current()
    full_store.clear()
    beat = run.status().heartbeat
    # Another process of this host goes by the driver's thread.
    reader = RunHandle.attach(directory.directory)
    assert not reader.wait(4.0)
    assert (values, run.status().heartbeat) == ([], beat)
    (tmp_path / "go").touch()
    caller.join(WAIT)
    assert values == ["trained"]


def status_of(thread: str | None) -> RunStatus:
    pid = os.getpid()
    return RunStatus(
        "running",
        heartbeat=time.time() - 3600,
        driver_pid=pid,
        driver_namespace=process_namespace(),
        driver_start=process_start(pid),
        driver_thread=thread,
    )


def test_a_driver_that_was_a_thread_is_dead_when_that_thread_is() -> None:
    names: list[str | None] = []
    go = threading.Event()
    thread = threading.Thread(target=lambda: (names.append(this_thread()), go.wait(WAIT)))
    thread.start()
    (name,) = until(lambda: names, WAIT, "a thread")
    assert this_thread() is None
    assert process_lives(status_of(None)) is True
    assert process_lives(status_of(name)) is True
    go.set()
    thread.join()
    assert name
    until(lambda: process_lives(status_of(name)) is False, WAIT, "the kernel's word of its end")
    # Another thread has its number.
    assert process_lives(status_of(f"{threading.get_native_id()} 1")) is False


def test_a_driver_that_is_stopped_is_not_said_to_have_died(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = launcher.submit(wait_for, str(tmp_path / "go"))
    until(lambda: handle.status().state == "running", WAIT, "ranks")
    pid = handle.status().driver_pid
    assert pid not in (None, os.getpid())
    monkeypatch.setattr(observer, "DRIVER_DEAD_AFTER", lambda: 0.2)
    monkeypatch.setattr(observer, "_MISSED", 0)
    os.kill(pid, signal.SIGSTOP)
    try:
        reader = RunHandle[str].attach(handle.directory)
        until(lambda: reader.status().final, WAIT, "a driver that counts as dead")
        with pytest.raises(EngineError, match=rf"\(process {pid} on .*\) is stopped: it sent no heartbeat for 0 s"):
            reader.result(WAIT)
    finally:
        os.kill(pid, signal.SIGCONT)
    monkeypatch.undo()
    (tmp_path / "go").touch()
    assert handle.result(WAIT) == "trained"


@pytest.mark.soak
def test_a_driver_that_starts_slowly_is_alive_as_long_as_its_process(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The process of the driver is there at once, and its first heartbeat comes much later than heartbeats are awaited.
    slow = tmp_path / "python"
    slow.write_text(f'#!/bin/sh\nsleep 3\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setattr(observer, "DRIVER_DEAD_AFTER", lambda: 0.2)
    monkeypatch.setattr(observer, "_MISSED", 0)
    named = launcher.options(run_id="run")
    with monkeypatch.context() as starting:
        starting.setattr(sys, "executable", str(slow))
        first = named.submit(max, 1, 2)
    second = named.submit(max, 1, 2)
    assert second.submission == 0
    assert second.status().state != "failed"
    assert RunHandle[int].attach(first.directory).result(WAIT) == 2


def test_a_driver_that_ends_before_its_first_heartbeat_is_dead(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as starting:
        starting.setattr(sys, "executable", "/bin/false")
        first = launcher.options(run_id="run").submit(max, 1, 2)
    reader = RunHandle[int].attach(first.directory)
    # Long before a heartbeat would have been missed.
    until(lambda: reader.status().state == "failed", observer.DRIVER_DEAD_AFTER() / 2, "the end of the driver")
    assert "died without ending the run" in str(reader.status().error)


def test_a_driver_that_cannot_start_says_why(launcher: Launcher, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object store cannot append lines to a log, and yet the cause must not be lost."""
    monkeypatch.setattr("rankzero.submit.prepare.Request.private", lambda _: {})
    for store in (launcher.store, f"{bucket}/runs"):
        handle = launcher.options(run_id="run", store=store).submit(max, 1, 2)
        with pytest.raises(EngineError, match="KeyError: 'engine'"):
            handle.result(WAIT)


FLAKY = """
from rankzero import store
failing, read, create = {"0.json", "driver"}, store.read_bytes, store.create

def fail_once(location):
    name = location.rpartition("/")[2]
    if name in failing:
        failing.remove(name)
        raise OSError("for a moment")

def read_if_it_answers(location):
    fail_once(location)
    return read(location)

def create_and_lose_the_answer(location, data, **options):
    made = create(location, data, **options) or read(location) == data
    fail_once(location)
    return made

store.read_bytes, store.create = read_if_it_answers, create_and_lose_the_answer
"""


def test_a_store_that_fails_when_the_driver_starts_delays_the_run(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = drivers.DriverProcess

    def with_flaky_store(command: list[str], **options: Any) -> drivers.DriverProcess:
        program = command.index("-c") + 1
        begin, end = command[program].split("; import rank")
        command[program] = f"{begin}\n{FLAKY}\nimport rank{end}"
        return start(command, **options)

    monkeypatch.setattr(drivers, "DriverProcess", with_flaky_store)
    assert launcher.options(run_id="run").submit(max, 1, 2).result(WAIT) == 2


@pytest.mark.soak
def test_a_forked_child_of_the_submitter_knows_that_the_driver_lives(launcher: Launcher, tmp_path: Path) -> None:
    """The driver is no child process of its own."""
    handle = launcher.options(run_id="run").submit(wait_for, str(tmp_path / "go"))
    until(lambda: handle.status().state == "running", WAIT, "the training")
    if not (child := os.fork()):
        os._exit(0 if handle.status().state == "running" else 1)
    assert os.waitpid(child, 0)[1] == 0
    (tmp_path / "go").touch()
    assert handle.result(WAIT) == "trained"


class Elsewhere(LocalEngine):
    """An engine whose drivers its caller cannot watch, as those of `SparkSubmitEngine`."""

    drives_elsewhere = True

    def start_driver(self, own: Submission, private: dict[str, Any]) -> None:
        drivers.start_driver(own, private)


class Apart(LocalEngine):
    prefers_own_process = True


@pytest.mark.parametrize(
    "engine",
    [LocalEngine(), *(pytest.param(engine, marks=pytest.mark.soak) for engine in (Apart(), Elsewhere()))],
    ids=["thread", "process", "leased"],
)
def test_a_forked_child_that_leaves_run_ends_no_training(launcher: Launcher, tmp_path: Path, engine: Any) -> None:
    request = launcher.options(run_id="run", engine=engine)._request()
    parent = os.getpid()
    try:
        with drivers.open_owned(request, wait_for, (str(tmp_path / "go"),), {}) as handle:
            until(lambda: handle.status().state == "running", WAIT, "the training")
            if not (child := os.fork()):
                raise SystemExit
            os.waitpid(child, 0)
            assert handle.status().state == "running"
            (tmp_path / "go").touch()
            assert handle.result(WAIT) == "trained"
    finally:
        if os.getpid() != parent:
            os._exit(0)


CLOSED = ["<&-", "<&- >&- 2>&-"]
RUNS = """
import sys, time
from rankzero import Launcher
from tests.faults.test_own_driver import Apart
value = Launcher(1, store=sys.argv[1], engine=Apart(), start_timeout=240).run(time.sleep, 0.5)
with open(sys.argv[1] + "/seen", "w") as file:
    print(value, file=file)
"""
STARTS_ZYGOTE = """
import os, sys
from rankzero.task import zygotes
from tests.conftest import ROOT
config = {"warm_start": True, "env": {}, "task": 0, "scratch": sys.argv[1]}
config |= {"code_path": str(ROOT / "core"), "grace": 0, "exit_timeout": 0}
with open(sys.argv[1] + "/log", "w+b") as log:
    agent = zygotes.start(config, log)
    agent.kill()
    code = agent.wait()
    agent.release()
with open(sys.argv[1] + "/seen", "w") as file:
    # Its configuration lacks so much that it may have ended before.
    print(code in (-9, 1), file=file)
"""


def run_without_streams(program: str, closed: str, directory: Path) -> str:
    command = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-c", program, str(directory)]
    subprocess.run(command, cwd=ROOT, check=True)
    return (directory / "seen").read_text()


@pytest.mark.parametrize("closed", CLOSED)
def test_a_caller_without_standard_streams_has_a_driver_of_its_own(tmp_path: Path, closed: str) -> None:
    assert run_without_streams(RUNS, closed, tmp_path) == "None\n"


@pytest.mark.usefixtures("own_zygotes")
@pytest.mark.parametrize("closed", CLOSED)
def test_a_process_without_standard_streams_starts_a_zygote(tmp_path: Path, closed: str) -> None:
    assert run_without_streams(STARTS_ZYGOTE, closed, tmp_path) == "True\n"
