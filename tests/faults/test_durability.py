"""A submitted run belongs to its directory: one driver at a time, anybody who attaches, nobody for too long."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import ROOT, until

from rankzero import Launcher, RunCancelledError, RunHandle
from rankzero.job import Job
from rankzero.run.directory import RunDirectory, Submission

WAIT = 90.0


def count_and_wait(directory: str) -> str:
    """Leaves a witness of its start and waits for a file ``go``."""
    import rankzero.train as rt

    context = rt.get_context()
    Path(directory, f"started-{context.attempt}-{os.getpid()}").touch()
    print("started", flush=True)
    while not Path(directory, "go").exists():
        time.sleep(0.02)
    return f"attempt {context.attempt}"


def starts(directory: Path) -> int:
    return len(list(directory.glob("started-*")))


def follow_until_started(handle: RunHandle[Any]) -> None:
    assert any("started" in line for line in handle.logs(follow=True))


def start(launcher: Launcher, directory: Path) -> RunHandle[str]:
    """A submitted run whose rank waits for ``go``."""
    handle = launcher.submit(count_and_wait, str(directory))
    follow_until_started(handle)
    return handle


@pytest.fixture
def single(launcher: Launcher) -> Launcher:
    return launcher.options(num_processes=1, run_id="one")


def test_a_late_cancel_does_not_reach_the_next_submission(single: Launcher, tmp_path: Path) -> None:
    first = start(single, tmp_path)
    first.cancel()
    again = single.submit(count_and_wait, str(tmp_path))
    # As a process does that was held up between its decision and its call.
    first.cancel()
    assert not again.status().final
    (tmp_path / "go").touch()
    assert again.result(WAIT) == "attempt 1"


def test_a_run_that_nobody_follows_ends_itself(single: Launcher, tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from tests.faults.test_durability import count_and_wait
from rankzero import Launcher
launcher = Launcher(store={str(tmp_path / "store")!r}, run_id="leased", orphan_timeout=4.0)
launcher.submit(count_and_wait, {str(tmp_path)!r})
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=WAIT, cwd=ROOT)
    handle = RunHandle.attach(tmp_path / "store" / "leased", follows=False)
    until(lambda: handle.own.status().final, WAIT, "the end of the run")
    with pytest.raises(RunCancelledError, match=r"no process followed the run for orphan_timeout=4.0 s"):
        handle.result()


def test_a_follower_keeps_a_leased_run_alive(single: Launcher, tmp_path: Path) -> None:
    handle = start(single.options(orphan_timeout=10.0), tmp_path)
    assert not handle.wait(13.0)
    (tmp_path / "go").touch()
    assert handle.result(WAIT) == "attempt 0"


@pytest.mark.soak
def test_the_last_follower_is_not_waited_for(single: Launcher, tmp_path: Path) -> None:
    handle = start(single.options(orphan_timeout=3600.0), tmp_path)
    last = RunHandle.attach(handle.directory)
    last.hold(10.0)
    # It holds as long as it follows.
    assert not last.wait(13.0)
    # A reader does not lengthen what the last follower has shortened.
    handle.renew_lease()
    assert handle.renewal_interval == 2.5
    until(lambda: handle.own.status().final, WAIT, "the end of the run")
    with pytest.raises(RunCancelledError, match=r"no process followed the run for 10.0 s"):
        handle.result()


DYING = """
import os, signal, sys
from rankzero import Launcher
from rankzero.submit import durable
from tests.faults.test_durability import count_and_wait

durable.start_driver = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
Launcher(store=sys.argv[2], run_id="one").submit(count_and_wait, sys.argv[1])
"""


def test_the_run_id_of_a_submitter_that_was_killed_before_its_driver_started_is_taken_over(
    single: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.1")
    (tmp_path / "go").touch()
    command = [sys.executable, "-c", DYING, str(tmp_path), str(single.store)]
    assert subprocess.run(command, cwd=ROOT, timeout=WAIT).returncode == -signal.SIGKILL
    handle = single.submit(count_and_wait, str(tmp_path))
    assert handle.job.submission == 1
    # A driver that started now would exit.
    job = handle.own.run.job_of(0)
    assert job
    assert Submission(handle.own.run, job).is_lost()
    assert handle.result(WAIT).startswith("attempt")


def test_a_submitter_that_was_held_up_attaches_to_the_run_of_the_one_who_came_after_it(
    single: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, others = RunDirectory.claim, list[RunHandle[str]]()

    def claim_late(run: RunDirectory, job: Job) -> bool:
        # As a laptop does that is shut at the wrong moment.
        late.undo()
        others.append(start(single, tmp_path))
        return claim(run, job)

    with monkeypatch.context() as late:
        late.setattr(RunDirectory, "claim", claim_late)
        handle = single.submit(count_and_wait, str(tmp_path))
    (tmp_path / "go").touch()
    assert [one.result(WAIT) for one in (*others, handle)] == ["attempt 0"] * 2
    assert starts(tmp_path) == 1
    assert set(handle.own.run.names()) == {"0.json", handle.own.name}


def test_an_interrupt_while_the_files_are_written_leaves_nothing(
    single: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Submission, *what: object) -> None:
        os.makedirs(self.directory)
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(Submission, "write_files", interrupted)
        with pytest.raises(KeyboardInterrupt):
            single.submit(count_and_wait, str(tmp_path))
    assert RunDirectory(str(tmp_path / "store" / "one")).names() == []
    (tmp_path / "go").touch()
    assert single.submit(count_and_wait, str(tmp_path)).result(WAIT) == "attempt 0"


def test_cancel_before_the_driver_has_started(
    single: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, cancelled = tmp_path / "python", tmp_path / "cancelled"
    late.write_text(f'#!/bin/sh\nwhile [ ! -e {cancelled} ]; do sleep 0.02; done\nexec {sys.executable} "$@"\n')
    late.chmod(0o755)
    with monkeypatch.context() as starting:
        starting.setattr(sys, "executable", str(late))
        handle = single.submit(count_and_wait, str(tmp_path))
    try:
        handle.cancel()
        handle.cancel()
    finally:
        cancelled.touch()
    with pytest.raises(RunCancelledError, match="on request"):
        handle.result(WAIT)
    assert starts(tmp_path) == 0
    # And the request is not one for the next submission.
    (tmp_path / "go").touch()
    assert single.submit(count_and_wait, str(tmp_path)).result(WAIT) == "attempt 1"
