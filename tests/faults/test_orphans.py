"""Nothing that a rank has started outlives its run, whatever process of rankzero is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import psutil
import pytest
from tests.conftest import is_alive, until

from rankzero import Launcher, RankZeroError

WAIT = 120.0
GONE = 8.0


STRANGERS = """
import os, signal, sys, time
how, file = sys.argv[1:]
if how != "child":
    os.fork() and os._exit(0)
    os.setsid()
    os.fork() and os._exit(0)
if how == "deaf":
    for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
open(f"{file}-{os.getpid()}", "w").close()
time.sleep(3600)
"""


def start_strangers(folder: str) -> None:
    """Starts processes that no environment, session or parent leads to, and waits."""
    for how in ("child", "daemon", "deaf"):
        subprocess.Popen([sys.executable, "-c", STRANGERS, how, f"{folder}/{how}"], env={})
    family = [os.getpid(), *(process.pid for process in psutil.Process().parents()[:3])]
    Path(f"{folder}/family.new").write_text(json.dumps(family))
    os.rename(f"{folder}/family.new", f"{folder}/family")
    time.sleep(WAIT)


CASES = list(product((True, False), ("rank", "agent", "zygote", "driver")))
OFTEN = {(True, "agent"), (True, "zygote"), (True, "driver"), (False, "agent")}


@pytest.mark.usefixtures("own_zygotes")
@pytest.mark.parametrize(
    ("warm_start", "who"),
    [pytest.param(*case, marks=[] if case in OFTEN else pytest.mark.soak) for case in CASES],
)
def test_what_a_rank_has_started_ends_with_the_run(
    launcher: Launcher, tmp_path: Path, warm_start: bool, who: str
) -> None:
    launcher = launcher.options(num_processes=1, warm_start=warm_start)
    handle = launcher.submit(start_strangers, str(tmp_path))

    def strangers() -> list[int]:
        assert not handle.status().final
        found = [int(path.name.partition("-")[2]) for path in tmp_path.glob("*-*") if path.is_file()]
        return found if len(found) == 3 and (tmp_path / "family").exists() else []

    left = until(strangers, WAIT, "strangers")
    family = dict(
        zip(("rank", "agent", "zygote", "driver"), json.loads((tmp_path / "family").read_text()), strict=True)
    )
    os.kill(family[who], signal.SIGKILL)
    for pid in [*left, *family.values()]:
        until(lambda pid=pid: not is_alive(pid), GONE, f"the end of {pid} of {left} and {family}")  # type: ignore[misc]
    if who != "driver":
        with pytest.raises(RankZeroError):
            handle.result(WAIT)
