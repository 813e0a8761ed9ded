"""Each way in which a rank ends, through each front door: the table of `docs/reliability.md`, row by row."""

import ctypes
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.conftest import ROOT

import rankzero.train as rt
from rankzero import Launcher, RankZeroError, RetryableError, RunHandle, TorchDistributor
from rankzero.compat.ray_train import FailureConfig, RunConfig, TorchTrainer

PAGE = ROOT / "docs" / "reliability.md"


def fail() -> None:
    raise ValueError("wrong")


def ask_again() -> None:
    raise RetryableError("the data server is busy")


def stop_the_run() -> None:
    directory = rt.get_context().storage_path
    assert directory
    RunHandle.attach(directory).cancel()
    time.sleep(600)


def kill(pid: int, number: int) -> None:
    os.kill(pid, number)
    time.sleep(600)


ENDS: dict[str, list[Callable[[], object]]] = {
    "value": [lambda: None, lambda: sys.exit(0)],
    "exception": [fail],
    "retryable": [ask_again],
    "exit": [lambda: sys.exit(3)],
    "code": [lambda: os._exit(1), lambda: ctypes.CDLL(None).exit(1)],
    "sigkill": [lambda: kill(os.getpid(), signal.SIGKILL)],
    "sigsegv": [lambda: ctypes.string_at(0)],
    "sigterm": [lambda: kill(os.getpid(), signal.SIGTERM)],
    "host": [lambda: kill(os.getppid(), signal.SIGKILL)],
    "stopped": [stop_the_run],
}


def train(end: str, number: int) -> int:
    """Ends the first attempt in a certain way; returns the number of the next one."""
    attempt = rt.get_context().attempt
    if attempt == 0:
        ENDS[end][number]()
    return attempt


def by_launcher(launcher: Launcher, end: str, number: int) -> Any:
    # Preemptions have a budget of their own.
    budgets = {"max_restarts": int(end != "sigterm"), "max_preemptions": int(end == "sigterm")}
    return launcher.options(**budgets).run(train, end, number)


def by_restart_on(launcher: Launcher, *args: Any) -> Any:
    return by_launcher(launcher.options(restart_on=SystemExit), *args)


def by_ray(launcher: Launcher, end: str, number: int) -> Any:
    once = RunConfig(failure_config=FailureConfig(max_failures=1))
    return TorchTrainer(lambda: train(end, number), launcher=launcher, run_config=once).fit().return_value


def by_torch_distributor(launcher: Launcher, *args: Any) -> Any:
    return TorchDistributor(1, local_mode=True, use_gpu=False).run(train, *args)


DOORS = {
    "`Launcher`": by_launcher,
    "`restart_on=SystemExit`": by_restart_on,
    "`TorchTrainer`": by_ray,
    "`TorchDistributor`": by_torch_distributor,
}


def rows() -> list[tuple[str, str, str, str]]:
    """Every cell of the table: the end, its cause, the front door, and what follows."""
    lines = PAGE.read_text().partition("## How a rank ends\n")[2].partition("\n\nAn exception or exit")[0].splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert table[0] == ["a rank ends by", "`error.cause`", *DOORS]
    found = []
    for what, cause, *outcomes in table[2:]:
        anchor = re.match(r'<a id="end-([a-z]+)"></a>', what)
        assert anchor, what
        found += [(anchor[1], cause, door, outcome) for door, outcome in zip(DOORS, outcomes, strict=True)]
    return found


# A rank imports this module from where it was sent to, without the page.
ROWS = rows() if PAGE.is_file() else []


def test_every_end_has_a_row() -> None:
    assert list(dict.fromkeys(end for end, *_ in ROWS)) == list(ENDS)


@pytest.mark.parametrize(("end", "cause", "door", "outcome"), ROWS)
def test_what_follows_an_end_of_a_rank(launcher: Launcher, end: str, cause: str, door: str, outcome: str) -> None:
    launcher = launcher.options(num_processes=1)
    for number in range(len(ENDS[end])):
        if outcome == "ends":
            with pytest.raises(RankZeroError) as caught:
                DOORS[door](launcher, end, number)
            assert cause in ("-", f"`{json.dumps(getattr(caught.value, 'cause', None))}`".replace("null", "None"))
        else:
            assert DOORS[door](launcher, end, number) in {"succeeds": (0, None), "restarts": (1,)}[outcome]
