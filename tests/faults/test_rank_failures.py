"""A rank that fails, however it fails, is named within seconds, while its peer waits in a collective."""

import gc
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import find, processes_with, until, wait_until_gone
from tests.faults.kit import TasksEngine
from tests.runs import folder_of

from rankzero import InvalidJobError, Launcher, WorkerFailedError

NAMED_WITHIN = 12.0  # On a busy machine; less than the 15 s of silence after which a process counts as lost

WAIT = 60.0


def fail(how: str, who: int) -> None:
    import signal
    import sys
    import time

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == who:
        print(f"failing at {time.time()}", flush=True)
        if how == "raise":
            raise ValueError("bad learning rate")
        if how == "sys.exit":
            sys.exit(3)
        if how == "os._exit":
            os._exit(9)
        if how == "os._exit(0)":
            os._exit(0)
        os.kill(os.getpid(), getattr(signal, how))
    dist.all_reduce(torch.ones(1))


CASES: dict[str, dict[str, Any]] = {
    "raise": {"exception_type": "ValueError", "exit_code": 1, "signal": None},
    "sys.exit": {"exception_type": "SystemExit", "exit_code": 3, "signal": None},
    "os._exit": {"exception_type": None, "exit_code": 9, "signal": None},
    "os._exit(0)": {"exception_type": None, "exit_code": 0, "signal": None},
    "SIGKILL": {"exception_type": None, "exit_code": None, "signal": "SIGKILL"},
}


@pytest.mark.parametrize(
    ("how", "who"), [("raise", 0), ("sys.exit", 0), ("os._exit", 1), ("os._exit(0)", 0), ("SIGKILL", 1)]
)
def test_the_failing_rank_and_its_cause_are_named(launcher: Launcher, how: str, who: int) -> None:
    # By `run`: its zygote is there for all these tests, a detached driver would start one for each.
    launcher = launcher.options(run_id="failing")
    with pytest.raises(WorkerFailedError) as caught:
        launcher.run(fail, how, who)
    handle = find(launcher)
    assert handle is not None
    error = caught.value
    assert error.rank == who
    for field, value in CASES[how].items():
        assert getattr(error, field) == value
    failed_at = float(next(line for line in error.log_tail or [] if "failing at" in line).split()[2])
    ended = handle.status().ended
    assert ended is not None
    assert ended - failed_at < NAMED_WITHIN
    assert f"rank {who} on " in str(error)
    if how == "raise":
        assert error.traceback
        assert "in fail\n" in error.traceback
        assert "worker.py" not in error.traceback
        assert "ValueError: bad learning rate" in str(error)
    if how == "SIGKILL":
        assert "out-of-memory" in str(error)


def test_a_rank_that_ignores_sigterm_and_its_children_are_ended(launcher: Launcher, marker: str) -> None:
    def train() -> None:
        import subprocess

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # A child in its own session, whose parent has exited: the kind that survives a process-group kill.
        subprocess.run(["sh", "-c", "trap '' TERM; setsid sleep 600 & "], check=True)
        print("ready", flush=True)
        while True:
            time.sleep(0.1)

    handle = launcher.submit(train)
    assert any("ready" in line for line in handle.logs(follow=True))
    assert processes_with(marker)
    handle.cancel()
    assert handle.wait(WAIT)
    assert handle.status().state == "cancelled"
    assert wait_until_gone(marker, 5.0) == []


def test_many_failures_one_process_no_leaked_descriptors(launcher: Launcher) -> None:
    def train() -> None:
        raise ValueError("again")

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    single = launcher.options(num_processes=1)
    # What earlier tests left is not collected, and closed, in between.
    gc.collect()
    counts = []
    for _ in range(3):
        with pytest.raises(WorkerFailedError):
            single.run(train)
        counts.append(count())
    # A thread of a run may end a moment later; what has leaked stays.
    until(lambda: count() <= counts[1], WAIT, f"no more descriptors than {counts[1]}")


def test_every_text_of_a_failure_can_be_logged_and_stored(launcher: Launcher) -> None:
    def train() -> None:
        # A file's name that is not UTF-8, as os.listdir returns it.
        raise ValueError("cannot read data\udce9.csv\0")

    with pytest.raises(WorkerFailedError) as caught:
        launcher.options(num_processes=1).run(train)
    facts = caught.value.to_json()
    texts = [str(caught.value), str(caught.value.args[0]), *(fact for fact in facts.values() if isinstance(fact, str))]
    assert "cannot read data\\udce9.csv\\x00" in texts[0]
    for text in [*texts, *facts["log_tail"], *facts["others"]]:
        assert "\0" not in text
        text.encode()


def test_a_refusal_that_names_a_file_can_be_logged_and_stored() -> None:
    error = InvalidJobError("no file data\udce9.csv")
    assert (str(error), error.args) == ("no file data\\udce9.csv", ("no file data\\udce9.csv",))


def fail_while_the_agent_stands_still() -> None:
    import subprocess

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        agent = os.getppid()
        # Longer than `CAUSE_WINDOW`, and shorter than a silence that cuts the connection.
        subprocess.Popen(["sh", "-c", f"sleep 3.5; kill -CONT {agent}"], start_new_session=True)
        os.kill(agent, signal.SIGSTOP)
        raise ValueError("bad learning rate")
    dist.all_reduce(torch.ones(1))


def test_a_failure_whose_agent_stands_still_is_still_the_cause(launcher: Launcher) -> None:
    with pytest.raises(WorkerFailedError, match="rank 1 on .*ValueError: bad learning rate"):
        launcher.options(engine=TasksEngine()).run(fail_while_the_agent_stands_still)


# -- children of a rank that go astray are no ranks


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
