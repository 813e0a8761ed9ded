"""Every row of the table in `docs/tries.md`, with Airflow's task runner and database."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.airflow import tries_dag
from tests.conftest import ROOT, until, wait_until_gone
from tests.tries import tries_table
from tests.tries.tries_table import WAIT, Place, Row, assert_each_has_a_scenario, rows


def session_of_airflow() -> Any:
    """Of its database, committed after the block; apart from those of other threads."""
    from airflow.utils.session import create_session

    return create_session(scoped=False)


class Airflow:
    """One task, whose tries run in this process unless they are to be killed."""

    def __init__(self, dag_id: str, place: Place, run_dag: Callable[..., Any], register: Callable[[Any], None]) -> None:
        self.dag_id = dag_id
        self.place = place
        self._run_dag = run_dag
        self._register = register
        self._run_id = ""

    def execute(self, **operator: Any) -> bool:
        """A new DAG run, with its retries; True if it has succeeded."""
        outcome = self._run_dag(tries_dag.make(self.dag_id, self.place, **operator))
        self._run_id = outcome.run_id
        return bool(outcome.state == "success")

    def clear(self) -> None:
        """The task, running or not."""
        from airflow.models.taskinstance import clear_task_instances

        with session_of_airflow() as session:
            clear_task_instances([self._instance(session)], session, run_on_latest_version=True)

    def execute_again(self, **operator: Any) -> bool:
        """Clears the task, which Airflow then runs."""
        self.clear()
        return self.try_again(**operator)

    @contextlib.contextmanager
    def storing_fails_once(self) -> Iterator[None]:
        """Has the first XCom of a task's result fail."""
        from airflow.sdk.execution_time import task_runner

        push = task_runner._push_xcom_if_needed

        def fail(*args: Any, **kwargs: Any) -> None:
            patch.setattr(task_runner, "_push_xcom_if_needed", push)
            raise OSError("the XCom backend is away")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(task_runner, "_push_xcom_if_needed", fail)
            yield

    def mark_failed(self) -> None:
        with session_of_airflow() as session:
            self._instance(session).set_state("failed", session=session)

    def try_again(self, **operator: Any) -> bool:
        """The next try, as the scheduler starts it and `dag.test` runs it; True if it has succeeded."""
        from airflow.sdk.definitions.dag import _run_task

        dag = tries_dag.make(self.dag_id, self.place, **operator)
        self._register(dag)
        with session_of_airflow() as session:
            instance = self._instance(session)
            instance.try_number += 1
            instance.state = "scheduled"
        _run_task(ti=instance, task=dag.get_task("train"))
        return self.state() == "success"

    def notice_death(self) -> None:
        """Of the task's process: what the scheduler does then."""
        with session_of_airflow() as session:
            instance = self._instance(session)
            instance.handle_failure("its process has exited", session=session)
        assert self.state() == "up_for_retry"

    @contextlib.contextmanager
    def ended_by_user(self, action: Callable[[], None]) -> Iterator[None]:
        """Has a user do something to the task that the block runs, once it trains.

        Airflow's supervisor hears of it from the server, and sends SIGTERM to the process of the task, which is this.
        """

        def act() -> None:
            self.place.await_training()
            action()
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: self.place.run().status().final, WAIT, "the end of the training")

        with self.place.beside(act, ends=True):
            yield

    @contextlib.contextmanager
    def apart(self, *, worker: bool = True, retries: int = 1, **operator: Any) -> Iterator[subprocess.Popen[bytes]]:
        """The first try, in a process of its own, which takes itself for a worker's or not, once its ranks train."""
        operator = {"retries": retries, **operator}
        self._register(tries_dag.make(self.dag_id, self.place, **operator))
        command = [sys.executable, "-m", "tests.airflow.tries_dag", self.dag_id, self.place.folder, self.place.mark]
        log = self.place.folder / "first-try.log"
        with log.open("wb") as output:
            child = subprocess.Popen(
                [*command, json.dumps(operator)] + ["worker"] * worker,
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            until(lambda: self.place.begun() or child.poll() is not None, WAIT, "a training or the end of the try")
            assert child.poll() is None, log.read_text()
            yield child
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{log.read_text()}") from error
        finally:
            child.kill()
            child.wait()

    def _instance(self, session: Any) -> Any:
        from airflow.models.taskinstance import TaskInstance
        from sqlalchemy import select

        found = select(TaskInstance).where(TaskInstance.dag_id == self.dag_id, TaskInstance.task_id == "train")
        return session.scalars(found.where(TaskInstance.run_id == self._run_id) if self._run_id else found).one()

    def state(self) -> str | None:
        with session_of_airflow() as session:
            state = self._instance(session).state
            return state and str(state)

    def xcom(self) -> dict[str, int] | None:
        from airflow.sdk.serde import deserialize

        with session_of_airflow() as session:
            found = self._instance(session).xcom_pull(task_ids="train", session=session)
            return found and dict(deserialize(found))


def killed(airflow: Airflow, meanwhile: Callable[[], None] = lambda: None, **changed: Any) -> None:
    with airflow.apart() as process:
        process.kill()
        process.wait()
    meanwhile()
    ranks, left = airflow.place.ranks(), airflow.place.lease()
    airflow.notice_death()
    with airflow.place.beside(lambda: until(lambda: airflow.place.lease() != left, WAIT, "the next try"), ends=True):
        assert airflow.try_again(retries=1, **changed)
    assert airflow.xcom()["pid"] in ranks


def deployed(airflow: Airflow) -> None:
    airflow.place.deploy(1)
    killed(airflow, lambda: airflow.place.deploy(2))


def ended_meanwhile(airflow: Airflow) -> None:
    with airflow.apart() as process:
        process.kill()
        process.wait()
    airflow.place.let("end")
    airflow.place.run().wait(WAIT)
    airflow.notice_death()
    assert airflow.try_again(retries=1)


def ended(airflow: Airflow) -> None:
    with airflow.ended_by_user(airflow.mark_failed):
        assert not airflow.execute()


def ended_then(**operator: Any) -> Callable[[Airflow], None]:
    def scenario(airflow: Airflow) -> None:
        with airflow.ended_by_user(airflow.clear):
            assert not airflow.execute()
        assert wait_until_gone(f"OF_RANK={airflow.place.mark}") == []
        airflow.place.let("end")
        assert airflow.try_again(**operator)

    return scenario


SCENARIOS: dict[str, Callable[[Airflow], None]] = {
    **tries_table.SCENARIOS,
    "killed": killed,
    "killed-other-arguments": lambda airflow: killed(airflow, lr=0.01, train="train_otherwise", num_processes=2),
    "ended-meanwhile": ended_meanwhile,
    "deployed": deployed,
    "ended": ended,
    "ended-again": ended_then(),
    "ended-other-arguments": ended_then(lr=0.01),
}


SOAK = {
    *tries_table.SOAK,
    # The delivery is that of "unstored-retry"; a real scheduler does it with `make faults`, too.
    "ended-meanwhile",
    # A real scheduler does it at every run of the suite: `test_the_next_try_attaches_to_the_training_of_a_killed_one`.
    "killed",
    "deployed",
    # As "unstored-retry" and "ended-other-arguments", with a clear instead of a retry or of changed arguments.
    "unstored",
    "ended-again",
    # In every run of the suite with Dagster, and `tests/tries/test_identity.py`.
    "failed-other-arguments",
}
"""Rows that run with `make faults` only: each training here begins with a driver that imports torch, some seconds."""


@pytest.fixture
def airflow(
    run_dag: Callable[..., Any], tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Airflow]:
    from tests.airflow.conftest import register

    monkeypatch.syspath_prepend(str(tmp_path))
    place = Place(tmp_path, f"of-{tmp_path.name}-{os.getpid()}")
    yield Airflow(re.sub(r"\W+", "-", request.node.name), place, run_dag, register)
    assert wait_until_gone(f"OF_RANK={place.mark}") == []


def test_every_row_has_a_scenario() -> None:
    assert_each_has_a_scenario(SCENARIOS)


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name, marks=[pytest.mark.soak] if row.name in SOAK else []) for row in rows()]
)
def test_the_training_does_what_the_table_says(row: Row, airflow: Airflow) -> None:
    SCENARIOS[row.name](airflow)
    airflow.place.assert_outcome(row.outcome, airflow.xcom())


@pytest.mark.soak
def test_a_clear_of_a_deferred_task_ends_its_training_although_its_trigger_is_gone(airflow: Airflow) -> None:
    with airflow.apart(deferrable=True) as process:
        # The state that `dag.test` gives a deferred task.
        until(lambda: airflow.state() == "queued", WAIT, "the deferral")
        process.kill()
        process.wait()
    ranks = airflow.place.ranks()
    airflow.clear()

    def end_later() -> None:
        until(lambda: not ranks & airflow.place.ranks(), WAIT, "the end of the first ranks")

    with airflow.place.beside(end_later, ends=True):
        assert airflow.try_again(retries=1)
    airflow.place.assert_outcome("resumes", airflow.xcom())
    (first,) = airflow.place.run().own.earlier()
    assert "the deferred Airflow task was cleared" in Path(first, "cancel").read_text()


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.soak)])
def test_the_ranks_end_with_a_process_that_is_no_worker_s(airflow: Airflow, number: signal.Signals) -> None:
    """Of ``airflow tasks test`` or ``dag.test()``: nobody comes back for the training, and no other try starts."""
    with airflow.apart(worker=False) as process:
        process.send_signal(number)
        assert process.wait(WAIT) == -number
        assert wait_until_gone(f"OF_RANK={airflow.place.mark}") == []
    assert len(airflow.place.begun()) == 1
    if number == signal.SIGTERM:
        # Airflow has no handler of SIGHUP.
        error = str(airflow.place.run().status().error)
        assert "on request: the process of the Airflow task was asked to exit" in error
