"""A training outlives the death of its step's process if another try will come, and only then."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from tests.conftest import ROOT, processes_with, until, wait_until_gone
from tests.dagster import durable_training

from rankzero import RunHandle

WAIT = 120.0


@dataclass
class Place:
    """Where the definitions of `durable_training` look, and what they leave."""

    folder: Path
    mark: str

    def training(self) -> RunHandle[Any]:
        (directory,) = (self.folder / "runs").iterdir()
        return RunHandle.attach(directory)

    def trains(self) -> bool:
        return any((self.folder / "runs").glob("*/job.json")) and self.training().status().checkpoint is not None

    def ranks(self) -> set[int]:
        return set(processes_with(f"OF_RANK={self.mark}"))

    def hurt_step(self, number: signal.Signals, of_try: int = 0) -> set[int]:
        """Sends a signal to the step's process once its ranks train; the ranks."""
        until(self.trains, WAIT, "a training")
        ranks = self.ranks()
        os.kill(int((self.folder / f"step-{of_try}").read_text()), number)
        return ranks

    def touch(self, name: str) -> None:
        (self.folder / name).touch()

    def stored(self) -> dict[str, Any]:
        (manifest,) = (self.folder / "assets").rglob("manifest.json")
        return json.loads((manifest.parent / json.loads(manifest.read_text())["data"]).read_text())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    # In the environment of ranks only, under this name.
    mark = f"of-{tmp_path.name}-{os.getpid()}"
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))
    monkeypatch.setenv("TEST_STORE", str(tmp_path / "runs"))
    monkeypatch.setenv("TEST_ASSETS", str(tmp_path / "assets"))
    monkeypatch.setenv("TEST_RANK_MARK", mark)
    # Of the steps' processes; not by a variable, for which the ranks would need a warm server of their own.
    monkeypatch.syspath_prepend(str(ROOT))
    yield Place(tmp_path, mark)
    assert wait_until_gone(f"OF_RANK={mark}") == []


@pytest.fixture
def home_instance(dagster_home: Path) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.get() as instance:
        yield instance


def execute(job: Callable[[], dg.JobDefinition], instance: dg.DagsterInstance, **more: Any) -> dg.JobExecutionResult:
    with dg.execute_job(dg.reconstructable(job), instance=instance, **more) as result:
        assert result.dagster_run
        return result


@contextlib.contextmanager
def beside(action: Callable[[], object]) -> Iterator[None]:
    """Does something while the main thread executes a run, which an action that fails lets end."""
    failures: list[BaseException] = []

    def act() -> None:
        try:
            action()
        except BaseException as error:
            failures.append(error)
            Path(os.environ["TEST_FOLDER"], "go").touch()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    yield
    thread.join()
    if failures:
        raise failures[0]


def take_up(place: Place, job: Any, instance: dg.DagsterInstance, number: signal.Signals) -> None:
    """Ends the step of a job by a signal: its next try has the same ranks, and their result."""
    seen: dict[str, Any] = {}

    def hurt() -> None:
        seen["before"] = place.hurt_step(number)
        until((place.folder / "step-1").exists, WAIT, "the next try")
        seen["after"] = place.ranks()
        place.touch("go")

    with beside(hurt):
        result = execute(job, instance)
    assert result.success
    assert seen["before"] <= seen["after"]
    assert place.stored()["pid"] in seen["before"]
    assert place.training().submission == 0


# By default: `test_a_step_that_was_killed_is_retried_and_takes_its_training_up`, in a real `dagster dev`.
@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_next_try_takes_up_the_training_of_a_step_that_died(
    place: Place, home_instance: dg.DagsterInstance, number: signal.Signals
) -> None:
    take_up(place, durable_training.durable_job, home_instance, number)


# By default: the row "unstored-retry" of `test_dagster_tries_table.py`.
@pytest.mark.soak
def test_a_result_that_came_while_no_step_looked_is_delivered(place: Place, home_instance: dg.DagsterInstance) -> None:
    seen: dict[str, Any] = {}
    place.touch("hold")

    def hurt() -> None:
        seen["ranks"] = place.hurt_step(signal.SIGKILL)
        place.touch("go")
        until(lambda: place.training().status().final, WAIT, "the end of the training")
        (place.folder / "hold").unlink()

    with beside(hurt):
        result = execute(durable_training.durable_job, home_instance)
    assert result.success
    assert place.stored()["pid"] in seen["ranks"]
    assert place.training().submission == 0


def test_without_another_try_the_training_dies_with_its_step(place: Place, home_instance: dg.DagsterInstance) -> None:
    seen: dict[str, Any] = {}

    def hurt() -> None:
        seen["ranks"] = place.hurt_step(signal.SIGKILL)
        seen["left"] = wait_until_gone(f"OF_RANK={place.mark}", WAIT)

    with beside(hurt):
        result = execute(durable_training.fragile_job, home_instance)
    assert not result.success
    assert seen["ranks"]
    assert seen["left"] == []


def test_a_run_that_is_terminated_while_its_step_waits_for_a_retry_ends_the_training(
    place: Place, home_instance: dg.DagsterInstance
) -> None:
    program = (
        "import dagster as dg\nfrom tests.dagster.durable_training import patient_job\n"
        "dg.execute_job(dg.reconstructable(patient_job), dg.DagsterInstance.get())"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, start_new_session=True) as run:
        try:
            assert place.hurt_step(signal.SIGKILL)
            (record,) = home_instance.get_runs()
            retries = dg.DagsterEventType.STEP_UP_FOR_RETRY
            until(lambda: home_instance.all_logs(record.run_id, of_type=retries), WAIT, "a step that waits")
            assert place.ranks()
            # What the code server does to the process of a run that a user terminates.
            run.send_signal(signal.SIGINT)
            run.wait(WAIT)
        finally:
            run.kill()
    # Without a look at the status, which would follow the run.
    assert wait_until_gone(f"OF_RANK={place.mark}", WAIT) == []
    until(lambda: place.training().status().final, WAIT, "the end of the training")
    assert place.training().status().state == "cancelled"


def test_a_failed_training_goes_on_from_its_checkpoint_in_the_next_try(
    place: Place, home_instance: dg.DagsterInstance
) -> None:
    place.touch("fail-0")
    with beside(lambda: (until((place.folder / "step-1").exists, WAIT, "the next try"), place.touch("go"))):
        assert execute(durable_training.durable_in_process, home_instance).success
    assert place.stored()["epoch"] == 1


def test_what_a_user_executes_again_goes_on_or_trains_anew(place: Place, home_instance: dg.DagsterInstance) -> None:
    place.touch("fail-0")
    failed = execute(durable_training.fragile_in_process, home_instance)
    assert not failed.success

    # From the checkpoint: it failed.
    place.touch("go")
    options = dg.ReexecutionOptions.from_failure(failed.run_id, home_instance)
    again = execute(durable_training.fragile_in_process, home_instance, reexecution_options=options)
    assert again.success
    assert place.stored()["epoch"] == 1
    trained = place.stored()["pid"]

    # From scratch: its result was delivered.
    options = dg.ReexecutionOptions(parent_run_id=again.run_id)
    assert execute(durable_training.fragile_in_process, home_instance, reexecution_options=options).success
    assert place.stored()["epoch"] == 0
    assert place.stored()["pid"] != trained
    assert place.training().submission == 2


@pytest.mark.parametrize(
    "job", [durable_training.fragile_in_process, pytest.param(durable_training.fragile_job, marks=pytest.mark.soak)]
)
def test_a_user_trains_anew_although_the_run_that_stored_the_result_was_deleted(
    place: Place, home_instance: dg.DagsterInstance, job: Callable[[], dg.JobDefinition]
) -> None:
    place.touch("go")
    first = execute(job, home_instance)
    options = dg.ReexecutionOptions(parent_run_id=first.run_id)
    second = execute(job, home_instance, reexecution_options=options)
    trained = place.stored()["pid"]
    home_instance.delete_run(second.run_id)
    assert execute(job, home_instance, reexecution_options=options).success
    assert place.stored()["pid"] != trained


def test_a_result_that_was_not_stored_is_delivered_although_its_run_was_deleted(
    place: Place, home_instance: dg.DagsterInstance
) -> None:
    place.touch("go")
    place.touch("assets")
    first = execute(durable_training.fragile_in_process, home_instance)
    options = dg.ReexecutionOptions(parent_run_id=first.run_id)
    second = execute(durable_training.fragile_in_process, home_instance, reexecution_options=options)
    assert not second.success
    home_instance.delete_run(second.run_id)
    (place.folder / "assets").unlink()
    assert execute(durable_training.fragile_in_process, home_instance, reexecution_options=options).success
    assert place.training().submission == 0
