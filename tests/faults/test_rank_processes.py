"""Children of a rank that go astray are no ranks."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

from tests.runs import folder_of

from rankzero import Launcher


def fork_and_return() -> str:
    child = os.fork()
    if child == 0:
        return "child"
    _, status = os.waitpid(child, 0)
    return f"rank {os.waitstatus_to_exitcode(status)}"


def test_a_forked_child_that_leaves_the_training_function_is_no_rank(launcher: Launcher) -> None:
    assert launcher.options(num_processes=1, timeout=60).run(fork_and_return) == "rank 0"


def report_from_a_child() -> None:
    import rankzero.train as rt

    rt.report({"loss": 0.1})


def report_from_another_process() -> int | None:
    child = multiprocessing.get_context("fork").Process(target=report_from_a_child)
    child.start()
    child.join(60)
    return child.exitcode


def test_a_report_of_a_process_that_is_not_the_rank_raises(launcher: Launcher, tmp_path: Path) -> None:
    launcher = launcher.options(num_processes=1, run_id="run")
    assert launcher.run(report_from_another_process) == 1
    log = (folder_of(tmp_path / "store" / "run") / "lines").read_text()
    assert "RuntimeError: rankzero.train.report was called in process" in log
    assert "only the rank itself may call it" in log
