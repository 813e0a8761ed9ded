"""Nothing that a rank has started outlives its run, whatever process of rankzero is killed."""

from __future__ import annotations

import json
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import psutil
import pytest
from tests.conftest import is_alive, until

from rankzero import EngineError, Launcher

WAIT = 120.0
GONE = 8.0


def start_a_stranger(file: str) -> None:
    """Starts a process that no environment, session or parent leads to, and waits."""
    program = ["sh", "-c", "setsid sleep 3600 >/dev/null 2>&1 & echo $!"]
    done = subprocess.run(program, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True)
    family = [os.getpid(), *(process.pid for process in psutil.Process().parents()[:3])]
    Path(f"{file}.new").write_text(json.dumps([int(done.stdout), family]))
    os.rename(f"{file}.new", file)
    time.sleep(WAIT)


@pytest.mark.usefixtures("own_warm_servers")
@pytest.mark.parametrize(
    ("warm_start", "who"),
    [
        (True, "server"),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in product((False, True), ("agent", "guard"))),
    ],
)
def test_what_a_rank_has_started_ends_with_the_run(
    launcher: Launcher, tmp_path: Path, warm_start: bool, who: str
) -> None:
    launcher = launcher.options(num_processes=1, warm_start=warm_start)
    file = tmp_path / "family"
    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(launcher.run, start_a_stranger, str(file))
        until(lambda: file.exists() or running.done(), WAIT, "a stranger")
        stranger, (_, agent, *above) = json.loads(file.read_text())
        ours = {"agent": agent, "server": above[0], "guard": above[1] if warm_start else above[0]}
        psutil.Process(ours[who]).kill()
        with pytest.raises(EngineError):
            running.result(WAIT)
    until(lambda: not is_alive(stranger), GONE, "the end of what the rank has started")
    until(lambda: not is_alive(agent), GONE, "the end of the agent")
