"""Who is interrupted while it follows a run ends it, or leaves it, however often it is interrupted."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from rankzero import RunCancelledError
from rankzero.run.tries import detaching

LOG = logging.getLogger(__name__)


@dataclass
class Run:
    """Stands for a run's handle, whose calls a signal may interrupt."""

    interrupts: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    directory: str = "/runs/one"
    reason: str = ""

    def _call(self, name: str) -> None:
        if name in self.interrupts:
            self.interrupts.remove(name)
            raise KeyboardInterrupt(name)
        self.calls.append(name)

    def cancel(self, receiver: Mapping[str, Any] | None = None, reason: str = "") -> None:
        self._call("cancel")
        self.reason = reason

    def wait(self, timeout: float) -> bool:
        self._call("wait")
        return True


@dataclass
class Step:
    """Stands for a step that is asked whether its run goes on, in the midst of which a signal comes."""

    goes_on: bool
    run: Run
    is_followed_by_another = True
    lease_when_attached = None
    retrier = None
    generation = "one"

    def detaches(self, error: BaseException) -> bool:
        self.run._call("detaches")
        return self.goes_on

    def has_accepted(self, receiver: Mapping[str, Any]) -> bool:
        return False

    def repeats(self, receiver: Mapping[str, Any]) -> bool:
        return False


def follow(run: Run, error: BaseException, *, goes_on: bool) -> None:
    with detaching(lambda: run, Step(goes_on, run), 1.0, LOG):  # type: ignore[arg-type, return-value]
        raise error


@pytest.mark.parametrize("again", [[], ["detaches"], ["cancel"], ["wait"], ["detaches", "cancel", "wait"]])
def test_a_second_interrupt_does_not_keep_the_run_alive(again: list[str]) -> None:
    run = Run(list(again))
    with pytest.raises(KeyboardInterrupt, match="the first"):
        follow(run, KeyboardInterrupt("the first"), goes_on=False)
    assert run.calls[-2:] == ["cancel", "wait"]
    assert run.reason == "its pipeline step was ended by KeyboardInterrupt"


def test_a_run_that_goes_on_is_left_alone() -> None:
    run = Run(["detaches"])
    with pytest.raises(OSError, match="away"):
        follow(run, OSError("the store is away"), goes_on=True)
    assert "cancel" not in run.calls


def test_the_end_of_the_run_itself_is_no_interrupt() -> None:
    run = Run()
    with pytest.raises(RunCancelledError):
        follow(run, RunCancelledError("by a user"), goes_on=False)
    assert run.calls == []
