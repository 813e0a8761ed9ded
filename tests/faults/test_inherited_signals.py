"""Signals that the caller blocks or ignores reach no process of rankzero."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.agent.test_zygotes import zygotes_of
from tests.conftest import ROOT, is_alive, until

from rankzero import Launcher, WorkerFailedError

WAIT = 60.0

OURS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1)


def signals_of(pid: int) -> dict[str, int]:
    """The masks of a process, as the kernel has them."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {line[:6]: int(line.split()[1], 16) for line in lines if line.startswith(("SigBlk", "SigIgn"))}


def look_at_signals() -> list[list[str]]:
    """The blocked and ignored signals of a rank, its agent and what started that."""
    found = []
    for process in [psutil.Process(), *psutil.Process().parents()[:2]]:
        masks = signals_of(process.pid)
        is_ours = "rankzero" in " ".join(process.cmdline())
        bits = {name: [n.name for n in OURS if mask >> (n - 1) & 1] for name, mask in masks.items()}
        found += [bits["SigBlk"] + bits["SigIgn"]] if is_ours else []
    return found


def die_as_rank_one(rank_one_dies: bool) -> None:
    import rankzero.train as rt

    if rank_one_dies and rt.get_context().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(WAIT)


@pytest.fixture
def with_signals_blocked() -> Any:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OURS)
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.usefixtures("with_signals_blocked", "own_zygotes")
@pytest.mark.parametrize("warm_start", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_killed_rank_is_noticed_though_the_caller_blocks_signals(launcher: Launcher, warm_start: bool) -> None:
    launcher = launcher.options(warm_start=warm_start, timeout=WAIT)
    for seen in launcher.options(num_processes=1).run(look_at_signals):
        assert seen == []
    with pytest.raises(WorkerFailedError, match="SIGKILL"):
        launcher.run(die_as_rank_one, True)


IGNORING = """
import signal, sys
from rankzero import Launcher
from tests.faults.test_inherited_signals import OURS, look_at_signals
for number in OURS:
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, OURS)
handle = Launcher(store=sys.argv[1], start_timeout=240).submit(look_at_signals)
print(handle.result(), flush=True)
"""


@pytest.mark.soak
@pytest.mark.usefixtures("own_zygotes")
def test_a_driver_of_its_own_starts_with_default_signals(tmp_path: Path) -> None:
    command = [sys.executable, "-c", IGNORING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.stdout == "[[], [], []]\n", done.stderr


OWNER_BLOCKS = """
import os, signal, sys
from rankzero import Launcher
from tests.faults.test_inherited_signals import OURS
signal.pthread_sigmask(signal.SIG_BLOCK, OURS)
Launcher(2, store=sys.argv[1], start_timeout=240).run(os.getpid)
print("ran", flush=True)
sys.stdin.read()
"""


@pytest.mark.soak
@pytest.mark.usefixtures("own_zygotes")
def test_a_zygote_ends_with_a_caller_that_blocks_signals(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER_BLOCKS, str(tmp_path)]
    caller = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert caller.stdout is not None
    assert caller.stdout.readline() == "ran\n"
    (zygote,) = zygotes_of(caller.pid)
    assert signals_of(zygote)["SigBlk"] == 0
    caller.communicate()
    until(lambda: not is_alive(zygote), WAIT, "the end of the zygote")
