"""A caller that stands still costs its run a pause, and not the training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.conftest import ROOT, until
from tests.faults import kit

from rankzero import Launcher, RunHandle, bounds
from rankzero.run import observer

WAIT = 120.0

CALLER = """
import ctypes, os, sys, threading, time
from rankzero import Launcher

def train(folder):
    open(os.path.join(folder, "training"), "w").close()
    while not os.path.exists(os.path.join(folder, "go")):
        time.sleep(0.05)
    return "trained"

def hold_the_lock():
    while not os.path.exists(os.path.join(folder, "hold")):
        time.sleep(0.05)
    # PyDLL keeps the interpreter's lock, as one sort of a long list does.
    ctypes.PyDLL(None).sleep(int(sys.argv[2]))
    open(os.path.join(folder, "held"), "w").close()

folder = sys.argv[1]
threading.Thread(target=hold_the_lock, daemon=True).start()
print(Launcher(2, store=os.path.join(folder, "store"), start_timeout=240).run(train, folder), flush=True)
"""


def stop(caller: psutil.Process, folder: Path, seconds: float) -> None:
    """As Ctrl-Z does, and ``fg``."""
    caller.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    caller.send_signal(signal.SIGCONT)


def hold_the_lock(_: psutil.Process, folder: Path, seconds: float) -> None:
    (folder / "hold").touch()
    until((folder / "held").exists, WAIT, "the end of a long call")


@pytest.mark.soak
@pytest.mark.parametrize("pause", [stop, hold_the_lock])
def test_a_caller_that_stands_still_for_long_loses_nothing(tmp_path: Path, pause: object) -> None:
    seconds = bounds.CONNECTION_LOST_AFTER() + 2.0
    command = [sys.executable, "-c", CALLER, str(tmp_path), str(int(seconds))]
    caller = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        until((tmp_path / "training").exists, WAIT, "a training")
        pause(psutil.Process(caller.pid), tmp_path, seconds)  # type: ignore[operator]
        (tmp_path / "go").touch()
        printed, errors = caller.communicate(timeout=WAIT)
    finally:
        if caller.poll() is None:
            os.kill(caller.pid, signal.SIGKILL)
            caller.communicate()
    assert printed == "trained\n", errors


LATE_CALLER = """
import os, signal, sys
from pathlib import Path
import rankzero.driver.driver as drivers
from rankzero import Launcher

init = drivers.Driver.__init__

def late(self, *args, **options):
    # Between the submission and the first status of its driver.
    Path(sys.argv[1], "submitted").touch()
    os.kill(os.getpid(), signal.SIGSTOP)
    init(self, *args, **options)

drivers.Driver.__init__ = late
launcher = Launcher(1, store=Path(sys.argv[1], "store"), run_id="one", env={"MARK": os.environ["MARK"]})
try:
    print("gave", launcher.run(max, 2, 3))
except Exception as error:
    print("raised", type(error).__name__)
"""


def test_a_stopped_caller_that_counts_as_dead_gets_no_result_of_another_training(
    launcher: Launcher, tmp_path: Path, marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer, "DRIVER_DEAD_AFTER", lambda: 0.5)
    monkeypatch.setattr(observer, "_MISSED", 0)
    command = [sys.executable, "-c", LATE_CALLER, str(tmp_path)]
    caller = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "MARK": marker})
    other = launcher.options(num_processes=1, run_id="one", store=tmp_path / "store")
    try:
        until((tmp_path / "submitted").exists, 60, "the submission")
        until(lambda: kit.is_stopped(caller.pid), WAIT, "its stop")
        assert other.submit(min, 2, 3).result(60) == 2
        caller.send_signal(signal.SIGCONT)
        assert "raised EngineError" in caller.communicate(timeout=90)[0]
        assert RunHandle.attach(str(tmp_path / "store" / "one")).result(60) == 2
    finally:
        caller.kill()
        caller.communicate()
