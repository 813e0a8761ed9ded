"""A person at a terminal presses Ctrl-C once: the training ends, whatever retries the step may have."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import processes_with, until, wait_until_gone
from tests.dagster import durable_training
from tests.dagster.terminal import CTRL_C, Terminal

from rankzero import RunHandle

WAIT = 120.0

MATERIALIZE = """
import dagster as dg
from tests.dagster.durable_training import defs, durable
dg.materialize([durable], resources=defs.resources)
"""

PROGRAMS = {
    # A process for each step, below the one of the run.
    "dagster job execute": [
        *("-m", "dagster", "job", "execute", "-f", durable_training.__file__, "-j", "durable_job"),
    ],
    "dagster job execute, in one process": [
        *("-m", "dagster", "job", "execute", "-f", durable_training.__file__, "-j", "durable_in_process"),
    ],
    "dg launch": ["-m", "dagster_dg_cli.cli", "launch", "--assets", "durable", "-f", durable_training.__file__],
    "dg.materialize in a script": ["-c", MATERIALIZE],
}

DEFAULT = {"dg.materialize in a script"}


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    home = tmp_path / "home"
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    mark = f"of-{tmp_path.name}-{os.getpid()}"
    yield {
        **os.environ,
        "DAGSTER_HOME": str(home),
        "TEST_FOLDER": str(tmp_path),
        "TEST_STORE": str(tmp_path / "runs"),
        "TEST_ASSETS": str(tmp_path / "assets"),
        "TEST_RANK_MARK": mark,
    }
    assert wait_until_gone(f"OF_RANK={mark}") == []


# By default, a step with a process of its own ends in `test_ctrl_c_of_dagster_dev_ends_the_trainings_of_its_runs`.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.soak) for name in PROGRAMS]
)
def test_ctrl_c_ends_the_training(name: str, environment: dict[str, str], tmp_path: Path) -> None:
    terminal = Terminal([sys.executable, *PROGRAMS[name]], environment)
    try:
        await_training(terminal, tmp_path)
        assert_ctrl_c_ends_it(terminal, environment, tmp_path)
    finally:
        terminal.close()


def await_training(terminal: Terminal, folder: Path) -> None:
    def trains() -> bool:
        assert not terminal.has_ended(), terminal.shown.decode("utf-8", "replace")
        jobs = list((folder / "runs").glob("*/job.json"))
        return bool(jobs) and RunHandle.attach(jobs[0].parent).status().checkpoint is not None

    until(trains, WAIT, "a training")


def assert_ctrl_c_ends_it(terminal: Terminal, environment: dict[str, str], folder: Path) -> None:
    ranks = f"OF_RANK={environment['TEST_RANK_MARK']}"
    assert processes_with(ranks)
    terminal.press(CTRL_C)
    pressed = time.monotonic()
    until(terminal.has_ended, WAIT, "the end of the program")
    assert wait_until_gone(ranks, WAIT) == []
    print(f"ended {time.monotonic() - pressed:.1f} s after the key")
    (job,) = (folder / "runs").glob("*/job.json")
    handle = RunHandle.attach(job.parent)
    # Its driver writes that after the ranks have ended, and is no part of the program.
    until(lambda: handle.status().final, WAIT, "the end of the run")
    assert handle.status().state == "cancelled"
    # Once was enough: no other try began.
    assert handle.submission == 0
    assert not (folder / "step-1").exists()
