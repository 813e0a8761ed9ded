"""What ends a run from outside: a driver's `Watch`, in front of a run directory whose answers the test gives."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import until
from tests.runs import submitted

from rankzero import RunCancelledError
from rankzero.driver.recorder import Recorder
from rankzero.driver.watch import Inbox, Watch
from rankzero.masking import Mask
from rankzero.run.directory import Submission


@pytest.fixture
def run(tmp_path: Path) -> Submission:
    return submitted(str(tmp_path / "one"), orphan_timeout=0.05)


@pytest.mark.parametrize("cause", ["lease", "signal", "request", "silent"])
def test_an_end_without_a_stored_request_is_noted_by_the_driver(run: Submission, cause: str) -> None:
    """The file of a request shows other tries that the run ends."""
    inbox, noted = Inbox(), []
    recorder = Recorder(run, Mask())
    watch = Watch(run, recorder, inbox, leased=cause == "lease", note_cancelling=lambda: noted.append(True))
    if cause == "signal":
        inbox.interrupt("the driver got SIGTERM")
    if cause == "request":
        run.request_cancel()
    if cause == "silent":
        # The store does not answer the process that cancels the run.
        inbox.cancel()
    until(watch.is_called_off, 10, "the end")
    assert bool(noted) == (cause != "request")
    with pytest.raises(RunCancelledError) as raised:
        watch.check()
    assert raised.value.requested == (cause in ("request", "silent"))


class SlowStore(Submission):
    """A run on an object store whose first reply to a reader of the request takes until the test lets it come."""

    def __init__(self, run: Submission) -> None:
        super().__init__(run.run, run.job)
        self.is_remote = True
        self.has_read, self.may_reply = threading.Event(), threading.Event()

    def cancel_request(self) -> dict[str, Any] | None:
        found = super().cancel_request()
        if not self.has_read.is_set():
            self.has_read.set()
            assert self.may_reply.wait(60)
        return found


def test_a_request_counts_that_is_stored_while_an_earlier_poll_is_under_way(
    run: Submission, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the error lacks the reason of the request."""
    slow, inbox = SlowStore(run), Inbox()
    watch = Watch(slow, Recorder(run, Mask()), inbox, leased=False)
    watch.check()
    assert slow.has_read.wait(60)
    run.request_cancel(reason="a user ended it")
    inbox.cancel()

    def wait_for_reply(futures: list[Future[None]], timeout: float) -> None:
        slow.may_reply.set()
        wait(futures, 60)

    monkeypatch.setattr("rankzero.driver.watch.wait", wait_for_reply)
    with pytest.raises(RunCancelledError, match="cancelled on request: a user ended it"):
        watch.check()


def test_a_driver_at_the_limit_of_threads_still_polls(run: Submission, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    watch = Watch(run, Recorder(run, Mask()), Inbox(), leased=False)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    watch.check()
    run.request_cancel()
    until(watch.is_called_off, 10, "the end")
