"""What ends a run from outside: a driver's `Watch`, in front of a run directory whose answers the test gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conftest import until

from rankzero import RunCancelledError
from rankzero.driver import Inbox, Recorder, Watch
from rankzero.job import Job
from rankzero.run import RunDirectory

JOB = Job("one", "train", 1, 1, False, None, None, 60.0, {}, orphan_timeout=0.05)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(str(tmp_path / "one"))
    assert run.claim(0)
    run.write_submission(JOB)
    return run


@pytest.mark.parametrize("cause", ["lease", "signal", "request"])
def test_only_an_end_without_a_request_is_noted_by_the_driver(run: RunDirectory, cause: str) -> None:
    """The file of a request shows other tries that the run ends."""
    inbox, noted = Inbox(), []
    recorder = Recorder(run, 0, 0)
    watch = Watch(run, JOB, recorder, inbox, leased=cause == "lease", note_cancelling=lambda: noted.append(True))
    if cause == "signal":
        inbox.interrupt("the driver got SIGTERM")
    if cause == "request":
        run.request_cancel(0)
    until(watch.is_called_off, 10, "the end")
    assert bool(noted) == (cause != "request")
    with pytest.raises(RunCancelledError) as raised:
        watch.check()
    assert raised.value.requested == (cause == "request")
