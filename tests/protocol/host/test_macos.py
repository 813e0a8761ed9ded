"""A macOS machine, simulated as far as Linux can (`macos/sitecustomize.py`): what submits and trains there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import is_alive, until

MACOS = Path(__file__).parent / "macos"

TRAINING = """
import sys
from rankzero import Launcher, WorkerFailedError

def train(folder):
    import os, subprocess, sys
    import torch, torch.distributed as dist, rankzero.train as rt
    assert not hasattr(os, "sched_getaffinity") and not os.path.isdir("/proc/self"), "not simulated"
    dist.init_process_group("gloo")
    if not dist.get_rank():
        # A child that would live for ever.
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(os.path.join(folder, "child"), "w") as file:
            file.write(str(child.pid))
    total = torch.ones(1)
    dist.all_reduce(total)
    print("of", int(total.item()))
    rt.report({"total": total}, checkpoint={"total": total})
    # The caller imports no torch for it.
    return {"weights": torch.full((1 << 20,), total.item()).numpy()}

def fail():
    raise ZeroDivisionError("on purpose")

folder = sys.argv[1]
launcher = Launcher(2, store=folder + "/runs", env={"GLOO_SOCKET_IFNAME": "lo"})
handle = launcher.submit(train, folder)
weights = handle.result(120)["weights"]
lines = sorted(handle.logs())
try:
    Launcher(1, store=folder + "/runs").run(fail)
    raise AssertionError("it did not fail")
except WorkerFailedError as error:
    cause = error.exception_type
print(weights.sum().item() / (1 << 20), lines, cause, sys.platform)
"""


@pytest.fixture
def macos() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(MACOS), os.environ.get("PYTHONPATH", "")])}


def test_it_submits_and_trains(tmp_path: Path, macos: dict[str, str]) -> None:
    """Cold, and what a rank started ends with the run."""
    script = tmp_path / "script.py"
    script.write_text(TRAINING)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], env=macos, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "2.0 ['[0] of 2', '[1] of 2'] ZeroDivisionError darwin"
    child = int((tmp_path / "child").read_text())
    # A killed orphan stays a zombie until init collects its status.
    until(lambda: not is_alive(child), 10.0, "the end of what the rank has started")
