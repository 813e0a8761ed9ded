"""A run ends with the process that called `run`, also if a child that this has forked holds its pipes open."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.conftest import ROOT, until, wait_until_gone

from rankzero import Launcher, RunHandle

WAIT = 120.0

CALLER = """
import os, sys, threading, time
from pathlib import Path
from rankzero import Launcher, LocalEngine
from tests.faults.test_durability import count_and_wait

folder, marker, apart = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "process"

class Engine(LocalEngine):
    prefers_own_process = apart

def fork():
    while not list(folder.glob("started-*")):
        time.sleep(0.02)
    child = os.fork()
    if child == 0:
        (folder / "child").write_text(str(os.getpid()))
        time.sleep(600)
        os._exit(0)

threading.Thread(target=fork, daemon=True).start()
Launcher(store=folder / "store", run_id="one", env={"MARK": marker}, engine=Engine()).run(count_and_wait, str(folder))
"""


@contextmanager
def caller(folder: Path, marker: str, driver: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process in `run`, which has forked a child."""
    process = subprocess.Popen([sys.executable, "-c", CALLER, str(folder), marker, driver], cwd=ROOT)
    child = folder / "child"
    try:
        until(lambda: (child.exists() and child.read_text()) or process.poll() is not None, WAIT, "a forked child")
        assert process.poll() is None
        yield process
    finally:
        process.kill()
        process.wait()
        if child.exists():
            os.kill(int(child.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("driver", ["thread", pytest.param("process", marks=pytest.mark.soak)])
def test_a_forked_child_does_not_keep_the_run_of_a_killed_caller(tmp_path: Path, marker: str, driver: str) -> None:
    with caller(tmp_path, marker, driver) as process:
        process.kill()
        process.wait()
        # Agents that have to notice a silence would be too late.
        assert wait_until_gone(f"MARK={marker}") == []
        handle = RunHandle.attach(tmp_path / "store" / "one")
        assert handle.wait(WAIT)
        # A driver that lived until then says so; one that was a thread of the caller has died with it.
        assert handle.status().state == ("cancelled" if driver == "process" else "failed")


@pytest.mark.soak
def test_a_forked_child_does_not_keep_the_run_of_an_interrupted_caller(tmp_path: Path, marker: str) -> None:
    with caller(tmp_path, marker, "process") as process:
        process.send_signal(signal.SIGINT)
        assert wait_until_gone(f"MARK={marker}") == []
        assert RunHandle.attach(tmp_path / "store" / "one").wait(WAIT)


@pytest.mark.soak
def test_a_caller_whose_run_succeeds_does_not_mind_the_child(launcher: Launcher, tmp_path: Path, marker: str) -> None:
    with caller(tmp_path, marker, "process") as process:
        (tmp_path / "go").touch()
        assert process.wait(WAIT) == 0
        assert RunHandle.attach(tmp_path / "store" / "one").result(0) == "attempt 0"
