"""A rank that loses its connection, or whose children go astray, ends with a reason and without a hang."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path

import pytest
from tests.runs import folder_of

from rankzero import Launcher, WorkerFailedError


def close_descriptors(how: str, path: str) -> str:
    # The first heartbeat may end the rank before it opens the file.
    Path(path).touch()
    os.closerange(3, 4096)
    with open(path, "w") as file:
        if how == "exec":
            os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"])
        if how == "raise":
            raise ValueError("a bad learning rate")
        # As long as a heartbeat may take.
        time.sleep(1.0)
        file.write("mine")
    return "done"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("return", "has lost the connection to its agent"),
        pytest.param("raise", "ValueError: a bad learning rate", marks=pytest.mark.soak),
        pytest.param("exec", "closed the connection to its agent and did not end", marks=pytest.mark.soak),
    ],
)
def test_a_rank_that_closes_its_descriptors_fails_with_that_reason(
    launcher: Launcher, tmp_path: Path, how: str, message: str
) -> None:
    file = tmp_path / "mine"
    with pytest.raises(WorkerFailedError, match=message):
        launcher.options(num_processes=1, timeout=60).run(close_descriptors, how, str(file))
    assert file.read_text() in ("mine", "")


def fork_and_return(how: str) -> str:
    child = os.fork()
    if child == 0:
        if how == "raise":
            raise ValueError("in the child")
        return "child"
    _, status = os.waitpid(child, 0)
    return f"{how} {os.waitstatus_to_exitcode(status)}"


@pytest.mark.parametrize(("how", "code"), [("return", 0), pytest.param("raise", 1, marks=pytest.mark.soak)])
def test_a_forked_child_that_leaves_the_training_function_is_no_rank(launcher: Launcher, how: str, code: int) -> None:
    assert launcher.options(num_processes=1, timeout=60).run(fork_and_return, how) == f"{how} {code}"


def report_from_a_child() -> None:
    import rankzero.train as rt

    rt.report({"loss": 0.1})


def report_from(method: str) -> int | None:
    child = multiprocessing.get_context(method).Process(target=report_from_a_child)
    child.start()
    child.join(60)
    return child.exitcode


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
def test_a_report_of_a_process_that_is_not_the_rank_raises(launcher: Launcher, tmp_path: Path, method: str) -> None:
    launcher = launcher.options(num_processes=1, run_id="run")
    assert launcher.run(report_from, method) == 1
    log = (folder_of(tmp_path / "store" / "run") / "lines").read_text()
    assert "RuntimeError: rankzero.train.report was called in process" in log
    assert "only the rank itself may call it" in log
