"""A user's habits in any order: run, interrupt, suspend, edit, delete, submit again, attach, cancel, collect.

A small model says what each call returns. Callers are processes that live through many calls, as notebooks do.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from tests.conftest import ROOT, is_alive, until, wait_until_gone
from tests.faults.habits.caller import BEGUN, RUN

from rankzero import RunHandle
from rankzero.host.processes import process_start

WAIT = 120.0
SUSPENDED = 2.0

ERRORS = {
    "failed": {"WorkerFailedError"},
    "cancelled": {"RunCancelledError"},
    # By whether its driver could still say that its owner died.
    "died": {"EngineError", "RunCancelledError"},
}
"""Classes of the errors that a reader of an ended run gets, by its state."""

Training = tuple[int, float]


class Caller:
    """A process of the user's."""

    def __init__(self, marker: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.habits.caller"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env={**os.environ, "HABITS": marker},
        )
        self.busy = self.begun = False

    def call(self, *command: Any) -> None:
        """Sends a command, and does not wait for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        self.busy = True

    def answer(self) -> dict[str, Any]:
        """Returns the answer to the last command. The suite's time limit bounds the wait."""
        self.await_begin()
        line = self._line()
        self.busy = self.begun = False
        return json.loads(line)  # type: ignore[no-any-return]

    def await_begin(self) -> None:
        """Waits until the process has begun with the last command; before that an interrupt would end it."""
        if not self.begun:
            assert self._line() == BEGUN
            self.begun = True

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the caller exited with {self.process.poll()}"
        return line

    def end(self) -> None:
        """Kills the process."""
        self.process.kill()
        self.process.communicate()


@dataclass
class Run:
    """What the model knows of the run directory.

    Attributes:
        training: Version of the code and learning rate.
        step: The step of the newest checkpoint.
        state: ``"living"``, ``"failed"``, ``"cancelled"``, ``"died"`` (with its owner) or ``"succeeded"``.
        owner: The number of the caller with which the run ends; None if it outlives its callers.
        taken: True if the result was acknowledged.
    """

    training: Training
    step: int
    state: str = "living"
    owner: int | None = None
    taken: bool = False


@dataclass
class Model:
    """The state of the world: what is in the store, and who waits."""

    run: Run | None = None
    waiting: dict[int, str] = field(default_factory=dict)

    def submitted(self, training: Training) -> tuple[str, int]:
        """Returns what a submission does, and at which step it begins: the table "What an existing run means"."""
        run = self.run
        if run is None or run.training != training:
            return ("refused" if run and run.state == "living" else "begins"), 0
        if run.state == "living":
            return "attaches", run.step
        if run.state == "succeeded":
            return ("begins", 0) if run.taken else ("delivers", run.step)
        return "begins", run.step


class Habits(RuleBasedStateMachine):
    """Does to rankzero what the rules say, and compares it with the model."""

    @initialize()
    def begin(self) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="habits-"))
        self.marker = f"habits-{self.place.name}"
        self.store = str(self.place / "store")
        self.model = Model()
        self.version, self.rate, self.begun = 0, 0.1, 0
        self.callers: list[Caller] = []
        self.callers = [Caller(self.marker) for _ in range(2)]

    def teardown(self) -> None:
        """Ends the callers; a run that outlives them is cancelled."""
        if not hasattr(self, "callers"):
            return
        try:
            if self.model.run and self.model.run.state == "living" and self.model.run.owner is None:
                self._order(self.model.run.step, "fail")
            for caller in self.callers:
                caller.end()
            assert wait_until_gone(self.marker, WAIT / 2) == [], "processes outlived their callers"
        finally:
            shutil.rmtree(self.place, ignore_errors=True)

    # What the model needs to know.

    def _free(self) -> int | None:
        return next((number for number, caller in enumerate(self.callers) if not caller.busy), None)

    def _lives(self) -> bool:
        return self.model.run is not None and self.model.run.state == "living"

    def _order(self, target: int, end: str) -> None:
        path = self.place / "orders"
        path.with_suffix(".new").write_text(json.dumps([target, end]))
        path.with_suffix(".new").rename(path)

    def _notes(self) -> list[dict[str, Any]]:
        path = self.place / "begun"
        # The last line may still be on its way.
        return (
            [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]
            if path.exists()
            else []
        )

    def _ranks(self) -> list[int]:
        # A number may be another process's by now.
        return [pid for note in self._notes() if is_alive(pid := note["pid"]) and process_start(pid) == note["start"]]

    def _call(self, number: int, verb: str) -> None:
        self.callers[number].call(self.store, str(self.place), verb, self.version, self.rate)

    def _await_begin(self, step: int) -> None:
        def found() -> bool:
            return len(self._notes()) > self.begun

        until(found, WAIT, "the begin of the training")
        notes = self._notes()
        assert len(notes) == self.begun + 1, "the training began twice"
        assert notes[-1]["step"] == step
        assert tuple(notes[-1]["training"]) == (self.version, self.rate)
        self.begun = len(notes)

    def _answers(self, expected: dict[str, dict[str, Any]]) -> None:
        """Every caller that waits gets what stands beside the verb of its call."""
        for number, verb in sorted(self.model.waiting.items()):
            answer = self.callers[number].answer()
            assert {name: answer.get(name) for name in expected[verb]} == expected[verb], answer
        self.model.waiting.clear()

    def _ended(self) -> None:
        until(lambda: not self._ranks(), WAIT, "the end of the ranks")

    # Habits.

    def _edit(self, change: str) -> None:
        """Changes what is launched next; most launches repeat what the run directory holds."""
        if self.model.run:
            self.version, self.rate = self.model.run.training
        if change == "code":
            self.version = (self.version + 1) % 3
        elif change == "arguments":
            self.rate = round(0.3 - self.rate, 1)

    @rule(verb=st.sampled_from(["run", "submit"]), change=st.sampled_from(["", "", "", "", "code", "arguments"]))
    @precondition(lambda self: self._free() is not None)
    def launch(self, verb: str, change: str) -> None:
        number = self._free()
        assert number is not None
        self._edit(change)
        training = (self.version, self.rate)
        what, step = self.model.submitted(training)
        if what == "begins":
            self._order(step, "")
        self._call(number, verb)
        if what == "begins":
            owner = number if verb == "run" else None
            self.model.run = Run(training, step, owner=owner)
            if verb == "run":
                self.model.waiting[number] = verb
            else:
                assert self.callers[number].answer() == {"value": None}
            self._await_begin(step)
            return
        answer = self.callers[number].answer()
        assert self.model.run is not None
        if what == "refused" or (what == "attaches" and verb == "run"):
            assert answer["error"] == "InvalidJobError", answer
        elif verb == "submit":
            assert answer == {"value": None}
        else:
            assert answer == {"value": [*training, self.model.run.step]}
            self.model.run.taken = True
        assert len(self._notes()) == self.begun, "a training began that nobody asked for"

    @rule()
    @precondition(lambda self: self._free() is not None)
    def attach(self) -> None:
        number = self._free()
        assert number is not None
        self._call(number, "attach")
        run = self.model.run
        if run is not None and run.state == "living":
            self.model.waiting[number] = "attach"
            return
        answer = self.callers[number].answer()
        if run is None:
            assert answer["error"] == "RunNotFoundError", answer
        elif run.state == "succeeded":
            assert answer == {"value": [*run.training, run.step]}
        else:
            assert answer["error"] in ERRORS[run.state], answer

    @rule(steps=st.integers(1, 3))
    @precondition(lambda self: self._lives())
    def train(self, steps: int) -> None:
        assert self.model.run is not None
        self.model.run.step += steps
        self._order(self.model.run.step, "")
        until(lambda: self._committed() == self.model.run.step, WAIT, "the checkpoint")  # type: ignore[union-attr]

    def _committed(self) -> int:
        return max(
            (manifest.metrics["step"] for manifest in RunHandle.attach(f"{self.store}/{RUN}").checkpoints()), default=0
        )

    @rule(steps=st.integers(0, 2))
    @precondition(lambda self: self._lives())
    def succeed(self, steps: int) -> None:
        run = self.model.run
        assert run is not None
        run.step += steps
        run.state, run.taken = "succeeded", "run" in self.model.waiting.values()
        self._order(run.step, "succeed")
        value = {"value": [*run.training, run.step]}
        self._answers({"run": value, "attach": value})
        self._settle("succeeded")

    @rule(steps=st.integers(0, 2))
    @precondition(lambda self: self._lives())
    def fail(self, steps: int) -> None:
        run = self.model.run
        assert run is not None
        run.step += steps
        run.state = "failed"
        self._order(run.step, "fail")
        error = {"error": "WorkerFailedError"}
        self._answers({"run": error, "attach": error})
        self._settle("failed")

    def _settle(self, state: str) -> None:
        handle = RunHandle.attach(f"{self.store}/{RUN}")
        assert handle.wait(WAIT)
        assert handle.status().state == state
        self._ended()

    @rule()
    @precondition(lambda self: self._lives() and self.model.run.owner is not None)
    def interrupt(self) -> None:
        run = self.model.run
        assert run is not None
        assert run.owner is not None
        self.callers[run.owner].await_begin()
        self.callers[run.owner].process.send_signal(signal.SIGINT)
        run.state = "cancelled"
        self._answers({"run": {"error": "KeyboardInterrupt"}, "attach": {"error": "RunCancelledError"}})
        self._settle("cancelled")

    @rule()
    @precondition(lambda self: any(verb == "attach" for verb in self.model.waiting.values()))
    def interrupt_a_reader(self) -> None:
        number = next(number for number, verb in self.model.waiting.items() if verb == "attach")
        self.callers[number].await_begin()
        self.callers[number].process.send_signal(signal.SIGINT)
        assert self.callers[number].answer()["error"] == "KeyboardInterrupt"
        del self.model.waiting[number]

    @rule()
    @precondition(lambda self: self._lives() and self.model.run.owner is not None)
    def kill_the_owner(self) -> None:
        run = self.model.run
        assert run is not None
        assert run.owner is not None
        owner = run.owner
        self.callers[owner].end()
        del self.model.waiting[owner]
        self._ended()
        until(lambda: RunHandle.attach(f"{self.store}/{RUN}").wait(0), WAIT, "the end of the run")
        for number in list(self.model.waiting):
            answer = self.callers[number].answer()
            assert answer["error"] in ERRORS["died"], answer
            del self.model.waiting[number]
        self.callers[owner] = Caller(self.marker)
        run.state = "died"

    @rule(number=st.integers(0, 1))
    @precondition(lambda self: self._lives())
    def suspend(self, number: int) -> None:
        """Stops a caller as Ctrl-Z does, and continues it: nothing is lost."""
        process = self.callers[number].process
        process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(SUSPENDED)
        finally:
            process.send_signal(signal.SIGCONT)
        assert self._ranks()

    @rule()
    @precondition(lambda self: self.model.run is not None)
    def delete_the_directory(self) -> None:
        directory, removed = Path(self.store, RUN), self.place / "removed"

        def is_gone() -> bool:
            shutil.rmtree(removed, ignore_errors=True)
            return not removed.exists()

        lived = self._lives()
        # At once: a driver that finds half of the directory may still write that it was cancelled.
        directory.rename(removed)
        until(is_gone, WAIT, "the removal")
        if lived:
            self._ended()
            gone = ("RunNotFoundError",)
            for number in list(self.model.waiting):
                answer = self.callers[number].answer()
                assert answer.get("error") in gone, answer
            self.model.waiting.clear()
            assert not directory.exists(), "a run came back into a directory that its user had removed"
        self.model.run = None

    @rule()
    @precondition(lambda self: self._free() is not None)
    def cancel(self) -> None:
        number = self._free()
        assert number is not None
        self._call(number, "cancel")
        run = self.model.run
        answer = self.callers[number].answer()
        if run is None:
            assert answer["error"] == "RunNotFoundError", answer
            return
        if run.state == "living":
            run.state = "cancelled"
            error = {"error": "RunCancelledError"}
            self._answers({"run": error, "attach": error})
            self._settle("cancelled")
        assert answer == {"value": run.state} or run.state == "died", answer

    @rule()
    @precondition(lambda self: self._free() is not None)
    def gc(self) -> None:
        number = self._free()
        assert number is not None
        self._call(number, "gc")
        removed = 0 if self.model.run is None or self.model.run.state == "living" else 1
        assert self.callers[number].answer() == {"value": removed}
        if removed:
            self.model.run = None


HEALTH = list(HealthCheck)


@pytest.mark.parametrize(
    ("examples", "steps"),
    [(5, 14), pytest.param(100, 30, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])],
    ids=["sample", "many"],
)
def test_calls_return_what_the_model_says(examples: int, steps: int) -> None:
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=HEALTH,
        phases=[Phase.explicit, Phase.generate],
        print_blob=True,
    )
    run_state_machine_as_test(Habits, settings=chosen)
