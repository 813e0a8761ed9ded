"""The trigger follows a run of this machine: its lines, its end, a user's kill, a directory that was deleted."""

import asyncio
import importlib
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.runs import job, submitted

from rankzero import Launcher, RunHandle
from rankzero.run.directory import Submission
from rankzero.run.status import RunStatus
from rankzero.store import files


def train(folder: str) -> int:
    import time

    for number in range(3):
        print(f"line {number}", flush=True)
    while not Path(folder, "go").exists():
        time.sleep(0.02)
    print("the last line")
    return 7


WORKER = ("scheduled", "queued", "running")
"""States of a task that is no longer deferred, and that a worker has or gets."""


def make_trigger(handle: RunHandle[Any], nonce: str = "") -> Any:
    """As the triggerer makes it: from what was stored in the database."""
    from airflow_rankzero.triggers import RunTrigger

    path, arguments = RunTrigger(handle.directory, nonce or handle.job.nonce).serialize()
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)(**arguments)


async def first(trigger: Any) -> dict[str, Any]:
    async for event in trigger.run():
        return dict(event.payload)
    raise AssertionError("no event")


def test_it_shows_the_lines_and_fires_at_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shown = ""
    handle = Launcher(1, store=tmp_path / "store").submit(train, str(tmp_path))

    async def follow() -> dict[str, Any]:
        nonlocal shown
        trigger = make_trigger(handle)
        following = asyncio.create_task(first(trigger))
        while "[0] line 2" not in shown:
            await asyncio.sleep(0.05)
            shown += capfd.readouterr().out
            assert not following.done()
        # The triggerer is restarted: neither of these ends the run.
        following.cancel()
        await trigger.cleanup()
        (tmp_path / "go").touch()
        return await first(make_trigger(handle))

    event = asyncio.run(asyncio.wait_for(follow(), 120))
    assert event == {"directory": handle.directory, "nonce": handle.job.nonce}
    assert handle.result() == 7
    assert "[0] the last line" in shown + capfd.readouterr().out


def test_a_user_s_kill_ends_the_run(tmp_path: Path) -> None:
    handle = Launcher(1, store=tmp_path / "store").submit(train, str(tmp_path))

    async def kill() -> dict[str, Any]:
        trigger = make_trigger(handle)
        await trigger.on_kill()
        return await first(trigger)

    asyncio.run(asyncio.wait_for(kill(), 120))
    assert handle.status().state == "cancelled"
    assert "on request: Airflow has no state of the task, as after a clear" in str(handle.status().error)


@pytest.mark.parametrize(
    ("nonce", "state"),
    [
        pytest.param("of another", None, id="a try after a clear has submitted it again"),
        pytest.param("", "deferred", id="another triggerer has it now"),
        pytest.param("", OSError("no API server"), id="nobody knows"),
        # Another triggerer had the trigger while this one was blocked, and could not follow the run.
        *(pytest.param("", state, id=f"a worker is about to follow it: {state}") for state in WORKER),
    ],
)
def test_a_run_that_is_not_the_triggers_to_end_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nonce: str, state: Any
) -> None:
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    def get_task_states(**_: Any) -> Any:
        if isinstance(state, Exception):
            raise state
        return {"r": {"train": state}}

    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", staticmethod(get_task_states))
    (run, *_) = make_runs(str(tmp_path), "running")
    handle = RunHandle[Any](run.run.directory)
    # What a task records when it defers.
    handle.offer({"task_instance": "i", "try": 1, "generation": "r#0"})
    trigger = make_trigger(handle, nonce)
    trigger.task_instance = SimpleNamespace(id="i", try_number=1, dag_id="d", task_id="train", run_id="r", map_index=-1)
    asyncio.run(asyncio.wait_for(trigger.on_kill(), 120))
    assert handle.cancelled_for() == {}


def test_a_task_whose_trigger_could_not_follow_follows_the_run_itself(
    dag: Any, run_dag: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, operator: Any
) -> None:
    from airflow_rankzero import triggers

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no such mount")

    monkeypatch.setattr(triggers, "Follower", fail)
    operator(lambda: 7, deferrable=True)
    outcome = run_dag(dag)
    assert outcome.xcom("train") == 7, outcome.errors


def test_a_trigger_does_not_follow_another_run_of_the_same_name(tmp_path: Path) -> None:
    """The directory was removed, and its name and the number of its submission are those of another run."""
    launcher = Launcher(1, store=tmp_path / "store", run_id="run")
    trigger = make_trigger(launcher.submit(int))
    shutil.rmtree(tmp_path / "store" / "run")
    handle = launcher.submit(train, str(tmp_path))
    event = asyncio.run(asyncio.wait_for(first(trigger), 60))
    assert "submitted again" in event["error"]
    asyncio.run(asyncio.wait_for(trigger.on_kill(), 120))
    (tmp_path / "go").touch()
    assert handle.result(120) == 7


def test_a_run_that_cannot_be_found_is_an_event_for_the_task(tmp_path: Path) -> None:
    handle = RunHandle[Any](str(tmp_path / "nothing"), job=job())
    event = asyncio.run(asyncio.wait_for(first(make_trigger(handle, "of a run")), 60))
    assert event["directory"] == str(tmp_path / "nothing")
    assert "RunNotFoundError" in event["error"]


def make_runs(store: str, state: str, *, count: int = 1) -> list[Submission]:
    # No other heartbeat follows, and none is missed while a test lasts.
    status = RunStatus(state=state, heartbeat=time.time(), queue_time=120.0)
    return [submitted(f"{store}/run-{number}", status) for number in range(count)]


def test_a_store_that_does_not_answer_delays_no_training_of_another_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor any other trigger: the triggerer's own threads stay free."""
    runs = make_runs(f"memory://{tmp_path.name}/away", "succeeded", count=100)
    triggers = [make_trigger(RunHandle[Any](run.run.directory)) for run in runs]
    (other, *_) = make_runs(f"memory://{tmp_path.name}/there", "succeeded")
    trigger = make_trigger(RunHandle[Any](other.run.directory))
    stalled, answers, filesystem_of = threading.Event(), threading.Event(), files.filesystem_of

    def filesystem(location: str) -> tuple[Any, str]:
        if "/away/" in location:
            stalled.set()
            answers.wait()
        return filesystem_of(location)

    monkeypatch.setattr(files, "filesystem_of", filesystem)

    async def follow() -> None:
        following = [asyncio.create_task(first(each)) for each in triggers]
        while not stalled.is_set():
            await asyncio.sleep(0.02)
        assert (await first(trigger))["directory"] == other.run.directory
        # What any other trigger does.
        assert await asyncio.to_thread(lambda: "done") == "done"
        assert not any(task.done() for task in following)
        answers.set()
        await asyncio.gather(*following)

    try:
        asyncio.run(asyncio.wait_for(follow(), 120))
    finally:
        answers.set()
