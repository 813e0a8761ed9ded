"""Two processes take a run for theirs: a driver that comes back, and submitters that come at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.conftest import ROOT, find, until, wait_until_gone

from rankzero import Launcher
from rankzero.run.checkpoints import list_committed

WAIT = 120.0
PAUSE = 75.0  # Seconds for which a driver stands still: agents and readers count it as lost long before


def train(folder: str) -> tuple[int, int]:
    """Reports a checkpoint again and again, until the folder says that it is enough; returns its first and last."""
    import rankzero.train as rt

    found = rt.get_checkpoint()
    first = step = found.load()["step"] + 1 if found else 0
    while not Path(folder, "end").exists():
        rt.report({"step": step}, checkpoint={"step": step})
        step += 1
        # Each costs an object store some ten requests.
        time.sleep(0.5)
    rt.context.await_checkpoint()
    return first, step


@pytest.mark.parametrize("scale", [0.3, pytest.param(1.0, marks=pytest.mark.soak)])
@pytest.mark.parametrize("place", ["disk", "object store"])
def test_a_driver_that_was_stopped_while_another_submission_took_over_harms_nothing(
    launcher: Launcher,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    marker: str,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    scale: float,
) -> None:
    monkeypatch.setenv("RANKZERO_TIME_SCALE", str(scale))
    # The old driver would restart what it has lost.
    launcher = launcher.options(num_processes=1, run_id="one", max_restarts=1)
    if place == "object store":
        launcher = launcher.options(store=f"{request.getfixturevalue('bucket')}/runs")
    old = launcher.submit(train, str(tmp_path))
    until(lambda: len(old.checkpoints()) > 1, WAIT, "checkpoints")
    driver = psutil.Process(until(lambda: old.status().driver_pid, WAIT, "its driver"))
    driver.suspend()
    stopped = time.monotonic()
    try:
        status = old.own.status()
        until(lambda: time.time() - old.own.status().heartbeat > 2 * status.interval, WAIT, "its silence")
        new = launcher.options(env={**(launcher.env or {}), "MARK": "of the next one"}).submit(train, str(tmp_path))
        assert new.job.submission == 1
        assert wait_until_gone(f"MARK={marker}") in ([], [driver.pid]), "its ranks had ended before"
        # This handle may see the driver's last heartbeat only now, and counts its silence from here.
        until(lambda: old.status().final, WAIT, "the end of the old submission")
        end, left = old.own.end(), {manifest.id for manifest in list_committed([old.own.directory])}
        until(lambda: list_committed([new.own.directory]), WAIT, "checkpoints of the next submission")
        time.sleep(max(0.0, PAUSE * scale - (time.monotonic() - stopped)))
    finally:
        driver.resume()
    until(lambda: not driver.is_running() or driver.status() == psutil.STATUS_ZOMBIE, WAIT, "the end of the driver")
    assert wait_until_gone(f"MARK={marker}") == []
    assert end
    assert old.own.end() == end, "the first end counts"
    status = old.status()
    assert (status.state, status.ended_by) == ("failed", end.ended_by), "it has not ended as it would have"
    published = {manifest.id for manifest in list_committed([old.own.directory])}
    assert len(published - left) <= 1, "it has published only what it was writing when it stopped"
    (tmp_path / "end").touch()
    first, last = new.result(WAIT)
    assert first > 0, "it has resumed"
    assert [manifest.metrics["step"] for manifest in new.checkpoints()][-1] == last - 1
    assert new.status().state == "succeeded"


SUBMITTER = """
import sys
from rankzero import Launcher
for line in sys.stdin:
    store, name = line.split()
    handle = Launcher(1, store=store, run_id=name).submit(max, 1, 2)
    print(handle.job.nonce, handle.result(), flush=True)
"""


@pytest.mark.parametrize("times", [5, pytest.param(200, marks=pytest.mark.soak)])
def test_of_two_submitters_that_come_at_once_one_starts_the_run(launcher: Launcher, times: int) -> None:
    pipe, store = subprocess.PIPE, str(launcher.store)
    command = [sys.executable, "-c", SUBMITTER]
    environment = {**os.environ, **dict(launcher.env or {})}
    submitters = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1, cwd=ROOT, env=environment)
        for _ in range(2)
    ]
    try:
        for number in range(times):
            for submitter in submitters:
                assert submitter.stdin
                submitter.stdin.write(f"{store} run-{number}\n")
            answers = {submitter.stdout.readline() for submitter in submitters if submitter.stdout}
            handle = find(launcher.options(run_id=f"run-{number}"))
            assert handle
            assert answers == {f"{handle.job.nonce} 2\n"}
            assert set(handle.own.run.names()) == {"0.json", handle.own.name}
    finally:
        for submitter in submitters:
            submitter.send_signal(signal.SIGKILL)
            submitter.communicate()
