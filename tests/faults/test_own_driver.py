"""A driver whose process can be queried is alive as long as the kernel says so, whatever the store takes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.conftest import ROOT, until
from tests.runs import submitted

from rankzero import EngineError, Launcher, LocalEngine, RunHandle, bounds
from rankzero.host.processes import process_namespace, process_start
from rankzero.run.observer import Observer
from rankzero.run.status import RunStatus
from rankzero.submit import durable

WAIT = 60.0


def wait_for(go: str) -> str:
    print("training", flush=True)
    while not Path(go).exists():
        time.sleep(0.02)
    return "trained"


@pytest.mark.parametrize(("is_thread", "lives"), [(False, True), (True, None)])
def test_a_driver_in_a_thread_is_left_to_its_heartbeat(tmp_path: Path, is_thread: bool, lives: bool | None) -> None:
    """Its process may outlive it, which only that process sees."""
    pid = os.getpid()
    status = RunStatus(
        "running",
        heartbeat=time.time() - 3600,
        driver_pid=pid,
        driver_namespace=process_namespace(),
        driver_start=process_start(pid),
        driver_thread=is_thread,
    )
    assert Observer(submitted(str(tmp_path / "other"))).driver_lives(status) is lives
    own, ended, living = (submitted(str(tmp_path / "run")), *(SimpleNamespace(poll=lambda n=n: n) for n in (0, None)))
    assert Observer(own, ended).driver_lives(status) == (not is_thread)  # type: ignore[arg-type]
    # The process that has submitted a run may outlive the driver in the run's stage.
    assert Observer(own, living).driver_lives(replace(status, driver_start="0")) == is_thread  # type: ignore[arg-type]


def test_a_driver_that_is_stopped_is_not_said_to_have_died(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = launcher.submit(wait_for, str(tmp_path / "go"))
    until(lambda: handle.status().state == "running", WAIT, "ranks")
    pid = handle.status().driver_pid
    assert pid not in (None, os.getpid())
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.3")
    os.kill(pid, signal.SIGSTOP)
    try:
        reader = RunHandle[str].attach(handle.directory)
        until(lambda: reader.status().final, WAIT, "a driver that counts as dead")
        with pytest.raises(EngineError, match=rf"\(process {pid} on .*\) is stopped: it sent no heartbeat for 18 s"):
            reader.result(WAIT)
    finally:
        os.kill(pid, signal.SIGCONT)
    monkeypatch.undo()
    (tmp_path / "go").touch()
    assert handle.result(WAIT) == "trained"


@pytest.mark.soak
def test_a_driver_that_starts_slowly_is_awaited(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "python"
    slow.write_text(f'#!/bin/sh\nsleep 20\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    named = launcher.options(run_id="run")
    with monkeypatch.context() as starting:
        starting.setattr(sys, "executable", str(slow))
        first = named.submit(max, 1, 2)
    second = named.submit(max, 1, 2)
    assert second.job.submission == 0
    assert second.status().state != "failed"
    assert RunHandle[int].attach(first.directory).result(WAIT) == 2


def test_a_driver_that_ends_before_its_first_heartbeat_is_dead(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as starting:
        starting.setattr(sys, "executable", "/bin/false")
        first = launcher.options(run_id="run").submit(max, 1, 2)
    # Long before a heartbeat would have been missed, by which other processes decide.
    until(lambda: first.status().state == "failed", bounds.DRIVER_DEAD_AFTER() / 2, "the end of the driver")
    assert "died without ending the run" in str(first.status().error)


def test_a_driver_that_dies_at_its_start_does_not_keep_its_run_id(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = launcher.options(run_id="run", engine=Apart(), num_processes=1)
    with monkeypatch.context() as starting:
        starting.setattr(sys, "executable", "/bin/false")
        with pytest.raises(EngineError, match="died without ending the run"):
            launcher.run(max, 1, 2)
    first = RunHandle[int].attach(f"{launcher.store}/run")
    assert first.own.end(), "only this process knows of the end at once"
    # Other processes know it from the heartbeat that does not come, not from its owner, which is a notebook perhaps.
    assert first.driver_lives(RunStatus()) is None
    assert launcher.run(max, 1, 2) == 2


def test_a_driver_that_cannot_start_says_why(launcher: Launcher, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object store cannot append lines to a log, and yet the cause must not be lost."""
    monkeypatch.setattr("rankzero.submit.start.Request.private", lambda _: {})
    for store in (launcher.store, f"{bucket}/runs"):
        handle = launcher.options(run_id="run", store=store).submit(max, 1, 2)
        with pytest.raises(EngineError, match="KeyError: 'engine'"):
            handle.result(WAIT)


class Apart(LocalEngine):
    prefers_own_process = True


@pytest.mark.parametrize(
    "engine", [LocalEngine(), pytest.param(Apart(), marks=pytest.mark.soak)], ids=["thread", "process"]
)
def test_a_forked_child_that_leaves_run_ends_no_training(launcher: Launcher, tmp_path: Path, engine: Any) -> None:
    request = launcher.options(run_id="run", engine=engine)._request()
    parent = os.getpid()
    try:
        with durable.opened(request, wait_for, (str(tmp_path / "go"),), {}, owned=True) as handle:
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


def test_a_store_that_fails_after_the_end_replaces_no_result(launcher: Launcher, monkeypatch: Any) -> None:
    monkeypatch.setattr(RunHandle, "cancel", lambda handle: os.stat("/no/such/store"))
    assert launcher.options(num_processes=1, engine=Apart()).run(max, 1, 2) == 2


RUNS = """
import sys, time
from rankzero import Launcher
from tests.faults.test_own_driver import Apart
value = Launcher(1, store=sys.argv[1], engine=Apart(), start_timeout=240).run(time.sleep, 0.5)
with open(sys.argv[1] + "/seen", "w") as file:
    print(value, file=file)
"""


@pytest.mark.parametrize("closed", ["<&-", "<&- >&- 2>&-"])
def test_a_caller_without_standard_streams_has_a_driver_of_its_own(tmp_path: Path, closed: str) -> None:
    command = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-c", RUNS, str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    assert (tmp_path / "seen").read_text() == "None\n"
