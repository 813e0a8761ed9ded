"""A run ends with the process that called `run`, also if a child that this has forked holds its pipes open."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.conftest import ROOT, find, until, wait_until_gone

from rankzero import EngineError, Launcher, RunHandle

WAIT = 120.0

CALLER = """
import os, resource, sys, threading, time
from pathlib import Path
from rankzero import Launcher, LocalEngine
from tests.faults.test_durability import count_and_wait

folder, marker, apart = Path(sys.argv[1]), sys.argv[2], sys.argv[3] != "thread"
if sys.argv[3] == "process, many files":
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    # The pipe between caller and driver gets a number that select.select refuses.
    files = [open(os.devnull) for _ in range(1100)]

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


@pytest.mark.parametrize("driver", ["thread", "process, many files"])
def test_a_forked_child_does_not_keep_the_run_of_a_killed_caller(tmp_path: Path, marker: str, driver: str) -> None:
    with caller(tmp_path, marker, driver) as process:
        process.kill()
        process.wait()
        # Agents that have to notice a silence would be too late.
        assert wait_until_gone(f"MARK={marker}") == []
        handle = RunHandle.attach(tmp_path / "store" / "one")
        assert handle.wait(WAIT)
        # A driver that lived until then says so; one that was a thread of the caller has died with it.
        assert handle.status().state == ("failed" if driver == "thread" else "cancelled")


def test_a_driver_that_cannot_be_started_leaves_a_run_that_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = Launcher(1, store=str(tmp_path), run_id="one")
    with monkeypatch.context() as patch:
        patch.setattr(
            threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("can't start new thread"))
        )
        with pytest.raises(RuntimeError, match="new thread"):
            launcher.run(os.getpid)
    handle = find(launcher)
    assert handle is not None
    with pytest.raises(EngineError, match="the driver could not be started: RuntimeError: can't start new thread"):
        handle.result(WAIT)
    assert launcher.run(os.getpid) > 0
