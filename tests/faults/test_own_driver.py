"""A driver whose process can be queried is alive as long as the kernel says so, whatever the store takes."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import until

from rankzero import Launcher, RunHandle
from rankzero.host import process_namespace, process_start, this_thread
from rankzero.run import RunDirectory, RunStatus, liveness, process_lives
from rankzero.submit import owned

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
    write = RunDirectory.write_status

    def write_if_there_is_room(run: RunDirectory, status: RunStatus) -> None:
        if not room and not status.certain:
            refused.append(time.time())
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(run, status)

    monkeypatch.setattr(RunDirectory, "write_status", write_if_there_is_room)
    monkeypatch.setattr(liveness, "DRIVER_STALE_AFTER", 0.5)
    monkeypatch.setattr(liveness, "dead_after", lambda _: 0.5)
    monkeypatch.setattr(owned, "CANCEL_TIMEOUT", 0.5)
    return room


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
    run = RunDirectory(str(tmp_path / "store" / "run"))
    until(lambda: (tmp_path / "store" / "run" / "job.json").exists() and run.status().state == "running", WAIT, "ranks")
    full_store.clear()
    beat = run.status().heartbeat
    # Another process of this host goes by the driver's thread.
    reader = RunHandle.attach(run.directory)
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
