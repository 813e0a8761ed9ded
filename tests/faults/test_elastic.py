"""Attempts start when their cluster has room, and an elastic one with what there is."""

import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import find, until
from tests.faults.kit import SlotsEngine, SlotsSession
from tests.tries.identities import identity_by

from rankzero import (
    EngineError,
    InvalidJobError,
    Launcher,
    RetryableError,
    RunCancelledError,
    RunTimeoutError,
    StartTimeoutError,
    WorkerFailedError,
)
from rankzero.driver.storage import Storage
from rankzero.kinds import RESTART_ON
from rankzero.worker import failures as worker

WAIT = 60.0


@pytest.fixture
def slots(tmp_path: Path) -> Path:
    """The file that says how many slots there are."""
    return tmp_path / "slots"


@pytest.fixture
def growing(launcher: Launcher, slots: Path, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """A run on as many slots as the file says."""
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.02")
    return launcher.options(engine=SlotsEngine(str(slots)), run_id="growing")


def await_event(launcher: Launcher, kind: str, what: str = "") -> dict[str, Any]:
    """The first event of a kind of the launcher's run, with this text."""

    def look() -> dict[str, Any] | None:
        run = find(launcher)
        found = (event for event in run.events() if event["type"] == kind) if run else ()
        # A busy machine is waited for, too.
        return next((event for event in found if what in event.get("what", "")), None)

    return until(look, WAIT, kind)


def test_a_cluster_that_grows_slowly_is_waited_for(
    growing: Launcher, slots: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slots.write_text("1")
    values: list[int] = []
    thread = threading.Thread(target=lambda: values.append(growing.run(len, "ab")))
    thread.start()
    await_event(growing, "waiting", "it offers 1 of the 2 task slots")
    slots.write_text("2")
    thread.join(WAIT)
    assert values == [2]
    # Whoever follows the run sees it, without asking for events.
    assert "[0] rankzero: waiting for this machine: it offers 1 of the 2 task slots" in capsys.readouterr().out


def test_start_timeout_bounds_the_wait_and_says_what_was_missing(growing: Launcher, slots: Path) -> None:
    slots.write_text("1")
    with pytest.raises(StartTimeoutError, match=r"offers 1 of the 2 .* start_timeout=1.5 s: add what is missing") as it:
        growing.options(start_timeout=1.5).run(len, "ab")
    assert it.value.missing == ["task 1"]


def test_a_wait_can_be_cancelled(growing: Launcher, slots: Path) -> None:
    slots.write_text("0")

    def cancel() -> None:
        await_event(growing, "waiting")
        run = find(growing)
        assert run
        run.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(RunCancelledError):
        growing.run(len, "ab")
    thread.join()


def train(slots: str, sizes: list[int]) -> list[list[int]]:
    """Goes on from attempt to attempt, each time in another world. Returns attempt, world size, sum of all so far."""
    import torch
    import torch.distributed as dist

    import rankzero.train as rt

    dist.init_process_group("gloo")
    context, checkpoint = rt.get_context(), rt.get_checkpoint()
    history: list[list[int]] = checkpoint.load()["history"] if checkpoint else []
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert context.world_size == dist.get_world_size() == ones.item() == int(os.environ["WORLD_SIZE"])
    history = [*history, [context.attempt, context.world_size]]
    if context.attempt == len(sizes):
        return history
    rt.report({}, checkpoint={"history": history})
    while (last := rt.get_checkpoint()) is None or last.load()["history"] != history:
        time.sleep(0.01)
    if context.rank == 0:
        Path(slots).write_text(str(sizes[context.attempt]))
        raise RetryableError("the world changes")
    time.sleep(WAIT)
    return []


def test_each_attempt_of_an_elastic_run_takes_what_there_is_and_goes_on(growing: Launcher, slots: Path) -> None:
    slots.write_text("3")
    elastic = growing.options(num_processes=(2, 4), max_restarts=2)
    assert elastic.run(train, str(slots), [2, 9]) == [[0, 3], [1, 2], [2, 4]]
    run = find(elastic)
    assert run
    said = [(event["attempt"], event["world_size"]) for event in run.events() if event["type"] == "world"]
    assert said == [(0, 3), (1, 2), (2, 4)]
    assert "[0] rankzero: attempt 1 starts with 2 ranks, of 2 to 4, on this machine" in list(run.logs())
    assert run.world_size == run.status().world_size == 4


def fail_and_leave(slots: str, left: str) -> None:
    """Leaves slots for the next attempt."""
    Path(slots).write_text(left)
    raise RetryableError("another try")


@pytest.mark.parametrize("left", ["0", "2"])
def test_a_wait_between_two_attempts_counts_for_the_timeout(
    growing: Launcher, slots: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    """A wait for slots, or for a store that is slow."""
    begin = Storage.begin
    monkeypatch.setattr(Storage, "begin", lambda own: begin(own) if slots.read_text() == "1" else time.sleep(WAIT))
    slots.write_text("1")
    brief = growing.options(num_processes=1, max_restarts=1, timeout=10.0, start_timeout=30.0)
    with pytest.raises(RunTimeoutError, match=r"timeout=10.0 s and was ended"):
        brief.run(fail_and_leave, str(slots), left)


@pytest.mark.parametrize("answer", ["nothing", "0"])
def test_an_engine_that_ends_while_it_is_waited_for_is_replaced(
    growing: Launcher, slots: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    """As one whose JVM dies: it says nothing, or that there are no slots. The next session lives."""
    monkeypatch.setattr(SlotsSession, "is_usable", lambda session: slots.read_text() == "2")
    monkeypatch.setattr(SlotsSession, "close", lambda session: slots.write_text("2"))
    slots.write_text(answer)
    with pytest.raises(EngineError, match="the SparkContext or its JVM ended while the run waited") as caught:
        growing.options(run_id="given-up", start_timeout=30.0).run(len, "ab")
    assert caught.value.cause == "lost"
    slots.write_text(answer)
    assert growing.options(max_restarts=1, start_timeout=30.0).run(len, "ab") == 2
    assert await_event(growing, "restart")["cause"] == "lost"


def test_the_bounds_of_an_elastic_world_are_a_part_of_its_identity(launcher: Launcher) -> None:
    sizes: list[Any] = [2, (2, 2), (2, 4), (4, 2), [2, 4]]
    elastic = [launcher.options(num_processes=size) for size in sizes if size != (4, 2)]
    names = [identity_by(one, list, (), {}) for one in elastic]
    assert len(set(map(str, names))) == 3
    assert names[2] == names[3]
    with pytest.raises(InvalidJobError, match=r"num_processes is \(4, 2\); an elastic world has"):
        launcher.options(num_processes=(4, 2))
    with pytest.raises(InvalidJobError, match="processes_per_task=2 does not divide num_processes=3"):
        launcher.options(num_processes=(2, 3), processes_per_task=2)


class MountLostError(OSError):
    """As a library of the user's has it."""


def is_broken(error: BaseException) -> bool:
    """What cannot be asked restarts nothing, and hides nothing."""
    return bool(error.no_such_attribute)  # type: ignore[attr-defined]


def is_stale(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno == 116


@pytest.mark.parametrize(
    ("restart_on", "restarts"),
    [
        (("CUDA error", "Stale file"), True),
        ("Stale file", True),
        (MountLostError, True),
        ((KeyError, OSError), True),
        ("tests.faults.test_elastic.MountLostError", True),
        # By the name of a class above it.
        (("OSError",), True),
        (is_stale, True),
        ((), False),
        (("CUDA error", KeyError), False),
        (is_broken, False),
    ],
)
def test_what_restart_on_names(restart_on: Any, restarts: bool) -> None:
    assert restart_on == () or RESTART_ON.check("restart_on", restart_on)
    worker.install_restart_on(pickle.dumps(RESTART_ON.check("restart_on", restart_on)))
    matched = worker.what_matches(MountLostError(116, "Stale file handle"), "MountLostError: Stale file handle")
    worker.install_restart_on(None)
    assert (matched is not None) is restarts


def test_a_run_restarts_on_the_exceptions_that_its_user_names(launcher: Launcher) -> None:
    # By value: no rank can import it.
    class LocalError(Exception):
        pass

    def fail_once(kind: str) -> int:
        import rankzero.train as rt

        if rt.get_context().attempt == 0:
            raise LocalError(kind)
        return rt.get_context().attempt

    launcher = launcher.options(num_processes=1, max_restarts=1, run_id="matched")
    assert launcher.options(restart_on=("CUDA error", LocalError)).run(fail_once, "Stale") == 1
    run = find(launcher)
    assert run
    assert next(event["cause"] for event in run.events() if event["type"] == "restart") == "matched"
    with pytest.raises(WorkerFailedError, match="LocalError.*unknown") as caught:
        launcher.options(restart_on=lambda error: "Stale" in str(error), run_id="other").run(fail_once, "unknown")
    assert caught.value.cause is None


@pytest.mark.parametrize("bad", [3, [3], [""], "", [int], int, [lambda error: True]])
def test_what_names_no_exception_is_refused(launcher: Launcher, bad: Any) -> None:
    with pytest.raises(InvalidJobError, match="restart_on has .*give texts of errors and classes"):
        launcher.options(restart_on=bad)
