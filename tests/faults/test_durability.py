"""A submitted run belongs to its directory: one driver at a time, anybody who attaches, nobody for too long."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import ROOT, find, until
from tests.faults import kit

from rankzero import InvalidJobError, Launcher, RunCancelledError, RunHandle
from rankzero.run.directory import RunDirectory, Submission
from rankzero.run.status import RunStatus

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


def test_a_run_id_submitted_by_many_at_once_starts_once(single: Launcher, tmp_path: Path) -> None:
    # Else each thread would parse all modules that travel.
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "go").touch()
    single.options(run_id="before").run(count_and_wait, str(tmp_path / "before"))
    handles: list[RunHandle[str]] = []
    threads = [
        threading.Thread(target=lambda: handles.append(single.submit(count_and_wait, str(tmp_path)))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    (tmp_path / "go").touch()
    assert [handle.result(WAIT) for handle in handles] == ["attempt 0"] * 8
    assert starts(tmp_path) == 1
    # The result waits until its receiver acknowledges it.
    assert single.submit(count_and_wait, str(tmp_path)).result(WAIT) == "attempt 0"
    assert starts(tmp_path) == 1
    handles[0].acknowledge()
    assert single.submit(count_and_wait, str(tmp_path)).result(WAIT) == "attempt 1"
    assert starts(tmp_path) == 2


def test_a_run_that_was_asked_to_end_is_not_attached_to(single: Launcher, tmp_path: Path) -> None:
    assert find(single) is None
    handle = start(single, tmp_path)
    assert single.submit(count_and_wait, str(tmp_path)).job.submission == 0
    handle.cancel()
    again = single.options(labels={"asks": "again"}).submit(count_and_wait, str(tmp_path))
    assert again.job.labels == {"asks": "again"}
    assert again.job.submission == 1
    (tmp_path / "go").touch()
    assert again.result(WAIT) == "attempt 1"


@pytest.mark.soak
def test_a_late_cancel_does_not_reach_the_next_submission(single: Launcher, tmp_path: Path) -> None:
    first = start(single, tmp_path)
    first.cancel()
    again = single.submit(count_and_wait, str(tmp_path))
    # As a process does that was held up between its decision and its call.
    first.cancel()
    assert not again.status().final
    (tmp_path / "go").touch()
    assert again.result(WAIT) == "attempt 1"


def test_another_training_is_refused_while_one_lives_and_begins_from_scratch_after_it(
    single: Launcher, tmp_path: Path
) -> None:
    other = single.options(code_version="another")
    handle = start(single, tmp_path)
    with pytest.raises(InvalidJobError, match="run_id 'one' is running another training"):
        other.submit(count_and_wait, str(tmp_path))
    handle.cancel()
    (tmp_path / "go").touch()
    assert other.submit(count_and_wait, str(tmp_path)).result(WAIT) == "attempt 1"
    # What another one has returned is not its result, although nobody has acknowledged it.
    assert single.submit(count_and_wait, str(tmp_path)).result(WAIT) == "attempt 2"


FOLLOW = """
import json, sys
from rankzero import RunHandle
handle = RunHandle.attach(sys.argv[1])
# A start on a busy machine may say that it waits.
print(json.dumps([[line for line in handle.logs(follow=True) if "rankzero:" not in line], handle.result()]))
"""


def test_two_processes_follow_one_run(single: Launcher, tmp_path: Path) -> None:
    handle = single.submit(count_and_wait, str(tmp_path))
    command = [sys.executable, "-c", FOLLOW, handle.directory]
    followers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    follow_until_started(handle)
    (tmp_path / "go").touch()
    outputs = [follower.communicate(timeout=WAIT)[0] for follower in followers]
    assert [json.loads(output) for output in outputs] == [[["[0] started"], "attempt 0"]] * 2


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
from rankzero.submit import drivers
from tests.faults.test_durability import count_and_wait

drivers.start_driver = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
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


LATE = """
import os, signal, sys
from rankzero import Launcher
from rankzero.run.directory import RunDirectory
from tests.faults.test_durability import count_and_wait

def claim(self, job, claim=RunDirectory.claim):
    # As a laptop does that is shut at the wrong moment.
    if not os.path.exists(sys.argv[1] + "/held"):
        open(sys.argv[1] + "/held", "w").close()
        os.kill(os.getpid(), signal.SIGSTOP)
    return claim(self, job)

RunDirectory.claim = claim
handle = Launcher(store=sys.argv[2], run_id="one").submit(count_and_wait, sys.argv[1])
open(sys.argv[1] + "/submitted", "w").close()
print(handle.result(), handle.job.submission)
"""


def test_a_submitter_that_was_held_up_attaches_to_the_run_of_the_one_who_came_after_it(
    single: Launcher, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", LATE, str(tmp_path), str(single.store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as late:
        try:
            until((tmp_path / "held").exists, WAIT, "a submitter that is held up")
            until(lambda: kit.is_stopped(late.pid), WAIT, "its stop")
            handle = start(single, tmp_path)
            assert handle.job.submission == 0
            os.kill(late.pid, signal.SIGCONT)
            until(
                lambda: (tmp_path / "submitted").exists() or late.poll() is not None, WAIT, "the end of its submission"
            )
            (tmp_path / "go").touch()
            assert late.communicate(timeout=WAIT)[0] == "attempt 0 0\n"
        finally:
            late.kill()
    assert handle.result(WAIT) == "attempt 0"
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


def test_a_machine_that_slept_does_not_take_its_driver_for_dead(
    single: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = start(single, tmp_path)
    now = time.time
    # An hour by the clock of the wall, in which nobody was awake.
    monkeypatch.setattr(time, "time", lambda: now() + 3600.0)
    assert handle.status().state == "running"
    assert RunHandle.attach(handle.directory).status().state == "running"
    assert single.submit(count_and_wait, str(tmp_path)).job.submission == 0
    (tmp_path / "go").touch()
    assert handle.result(WAIT) == "attempt 0"


def test_who_has_watched_a_driver_elsewhere_does_not_ask_the_clock_of_the_wall(
    single: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "go").touch()
    run = single.submit(count_and_wait, str(tmp_path)).own
    RunHandle.attach(run.run.directory).result(WAIT)
    now = time.time
    os.unlink(run.path("end.json"))
    run.write_status(RunStatus("running", heartbeat=now(), driver_host="elsewhere", driver_pid=1))
    follower = RunHandle.attach(run.run.directory)
    assert follower.status().state == "running"
    monkeypatch.setattr(time, "time", lambda: now() + 3600.0)
    assert follower.status().state == "running"
    # Who comes new to it cannot know better.
    assert RunHandle.attach(run.run.directory).status().state == "failed"


def test_a_dead_driver_whose_clock_was_ahead_is_replaced(
    single: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.3")
    (tmp_path / "go").touch()
    run = single.submit(count_and_wait, str(tmp_path)).own
    RunHandle.attach(run.run.directory).result(WAIT)
    os.unlink(run.path("end.json"))
    beat = time.time() + 120.0
    run.write_status(RunStatus("running", heartbeat=beat, interval=0.5, driver_host="elsewhere", driver_pid=1))
    again = single.submit(count_and_wait, str(tmp_path))
    assert again.job.submission == 1
    assert again.result(WAIT) == "attempt 1"


@pytest.mark.soak
def test_a_driver_that_comes_too_late_leaves_the_run_alone(single: Launcher, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    handle = single.submit(count_and_wait, str(tmp_path))
    assert handle.result(WAIT) == "attempt 0"
    command = [sys.executable, "-c", "from rankzero.driver.main import main; main()", handle.directory, "--submission"]
    private = json.dumps({"env": {}, "engine": {}, "nonce": handle.job.nonce})
    for _ in range(2):
        late = subprocess.run([*command, "0"], input=private, capture_output=True, text=True, timeout=WAIT)
        assert "has a driver already" in late.stderr
        handle.acknowledge()
        single.submit(count_and_wait, str(tmp_path)).result(WAIT)
    assert starts(tmp_path) == 2


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


def test_cancel_after_success_changes_nothing(single: Launcher, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    handle = single.submit(count_and_wait, str(tmp_path))
    assert handle.result(WAIT) == "attempt 0"
    handle.cancel()
    assert handle.status().state == "succeeded"
    assert RunHandle.attach(handle.directory).result() == "attempt 0"
