"""Signals that the caller blocks or ignores reach no process of rankzero."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

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
