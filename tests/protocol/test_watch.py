"""What ends a run from outside: a driver's `Watch`, in front of a run directory whose answers the test gives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.runs import submitted

from rankzero import RunCancelledError
from rankzero.driver.recorder import Recorder
from rankzero.driver.watch import Watch
from rankzero.masking import Mask
from rankzero.run.directory import Submission


@pytest.fixture
def run(tmp_path: Path) -> Submission:
    return submitted(str(tmp_path / "one"), orphan_timeout=0.05)


async def ended(watch: Watch, meanwhile: Callable[[], object] = lambda: None) -> RunCancelledError:
    """The error with which a watch ends a run."""
    starting = asyncio.create_task(watch.start())
    await asyncio.to_thread(meanwhile)
    await starting
    async with asyncio.timeout(60):
        while not watch.is_called_off():
            await watch.wait(0.1)
    watch.end()
    with pytest.raises(RunCancelledError) as raised:
        watch.check()
    return raised.value


@pytest.mark.parametrize("cause", ["lease", "signal", "request", "silent"])
@pytest.mark.parametrize("drives", [True, False])
def test_an_end_is_noted_by_the_driver_for_other_tries(run: Submission, cause: str, drives: bool) -> None:
    recorder = Recorder(run, Mask())
    if drives:
        recorder.note_thread()
    watch = Watch(run, recorder, leased=cause == "lease")
    if cause == "signal":
        watch.interrupt("the driver got SIGTERM")
    if cause == "request":
        run.request_cancel()
    if cause == "silent":
        # The store does not answer the process that cancels the run.
        watch.cancel()
    error = asyncio.run(ended(watch))
    assert recorder.status.cancelling is drives
    assert error.requested == (cause in ("request", "silent"))


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


def test_a_request_counts_that_is_stored_while_an_earlier_read_is_under_way(run: Submission) -> None:
    """Else the error lacks the reason of the request."""
    slow = SlowStore(run)
    watch = Watch(slow, Recorder(run, Mask()), leased=False)

    def cancel() -> None:
        assert slow.has_read.wait(60)
        run.request_cancel(reason="a user ended it")
        watch.cancel()
        slow.may_reply.set()

    assert "cancelled on request: a user ended it" in str(asyncio.run(ended(watch, cancel)))


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_store_that_hangs_delays_no_end(run: Submission, is_cancelled: bool) -> None:
    slow = SlowStore(run)
    watch = Watch(slow, Recorder(run, Mask()), leased=False)

    def end() -> None:
        assert slow.has_read.wait(60)
        watch.cancel() if is_cancelled else watch.interrupt("the driver got SIGTERM")

    try:
        assert asyncio.run(ended(watch, end)).requested == is_cancelled
    finally:
        slow.may_reply.set()
