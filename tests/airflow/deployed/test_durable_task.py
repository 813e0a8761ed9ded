"""The training belongs to its run directory: what dies in Airflow does not take it along, what a user ends does."""

import os
import secrets
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.airflow.deployment import RUN_TIMEOUT, STOP_TIMEOUT, Deployment, wait_until
from tests.conftest import processes_with

from rankzero import RunHandle


@dataclass
class Training:
    """A DAG run whose training waits for a word."""

    airflow: Deployment
    dag_id: str
    run_id: str
    marker: str
    folder: Path

    @property
    def run(self) -> RunHandle[Any]:
        return self.airflow.run_of(self.dag_id, self.run_id)

    def await_ranks(self) -> list[int]:
        """The processes of its ranks, once they train."""
        wait_until(lambda: self.run.status().state == "running", RUN_TIMEOUT, "the training")
        wait_until(lambda: self.run.status().checkpoint, RUN_TIMEOUT, "a checkpoint")
        return sorted(processes_with(self.marker))

    def await_log(self, words: str, try_number: int = 1) -> None:
        def there() -> bool:
            return words in self.airflow.log(self.dag_id, self.run_id, "train", try_number)

        wait_until(there, RUN_TIMEOUT, words)

    def let_go(self) -> None:
        (self.folder / "go").touch()

    def await_try(self, number: int, state: str = "running") -> None:
        def there() -> bool:
            now = self.airflow.look(self.dag_id, self.run_id, "train")
            return bool(now["try_number"] >= number and now["state"] == state)

        wait_until(there, RUN_TIMEOUT, f"try {number} being {state}")

    def finish(self) -> dict[str, int]:
        """What the task behind it made of the result."""
        state = self.airflow.finish(self.dag_id, self.run_id)
        tries = int(self.airflow.look(self.dag_id, self.run_id, "train")["try_number"])
        logs = [self.airflow.log(self.dag_id, self.run_id, "train", number) for number in range(1, tries + 1)]
        assert state == "success", logs
        return dict(self.airflow.xcom(self.dag_id, self.run_id, "describe"))


def start(airflow: Deployment, dag_id: str, folder: Path) -> Training:
    marker = f"told-{secrets.token_hex(8)}"
    run_id = airflow.trigger(dag_id, mark=marker, folder=str(folder))
    return Training(airflow, dag_id, run_id, marker, folder)


@pytest.fixture
def durable(airflow: Deployment, tmp_path: Path) -> Iterator[Training]:
    training = start(airflow, "durable", tmp_path)
    yield training
    wait_until(lambda: not processes_with(training.marker), STOP_TIMEOUT, "the end of the ranks")


def test_the_next_try_attaches_to_the_training_of_a_killed_one(durable: Training) -> None:
    ranks = durable.await_ranks()
    os.kill(durable.airflow.task_process("durable", durable.run_id, "train"), signal.SIGKILL)
    durable.await_try(2)
    durable.await_log("attached to the run", 2)
    assert set(ranks) <= set(processes_with(durable.marker))
    durable.let_go()
    made = durable.finish()
    assert made["pid"] in ranks
    assert made["epoch"] == 0
    log = durable.airflow.log("durable", durable.run_id, "train", 2)
    assert "[0] rank has seen it" in log


@pytest.mark.soak
def test_a_worker_that_is_drained_leaves_the_training_to_another(durable: Training) -> None:
    ranks = durable.await_ranks()
    # What a supervisor does with a SIGTERM of its own: it passes it on.
    os.kill(durable.airflow.task_process("durable", durable.run_id, "train"), signal.SIGTERM)
    durable.await_log("attached to the run")
    durable.let_go()
    assert durable.finish()["pid"] in ranks
    # It has cost no try.
    assert durable.airflow.look("durable", durable.run_id, "train")["try_number"] == 1


def await_retry(training: Training) -> None:
    """Kills the task; Airflow then waits an hour for the retry, and the ranks train."""
    training.await_ranks()
    os.kill(training.airflow.task_process(training.dag_id, training.run_id, "train"), signal.SIGKILL)
    training.await_try(1, "up_for_retry")
    training.airflow.await_watch(training.dag_id, training.run_id)
    assert not training.run.status().final


def test_deleting_a_dag_ends_a_training_that_waits_for_its_retry(airflow: Deployment, tmp_path: Path) -> None:
    training = start(airflow, "forgotten", tmp_path)
    await_retry(training)
    run = training.run
    airflow.call("DELETE", "/api/v2/dags/forgotten")
    wait_until(lambda: run.status().final, RUN_TIMEOUT, "the end of the run")
    assert "on request: Airflow has deleted the task" in str(run.status().error)
    wait_until(lambda: not processes_with(training.marker), STOP_TIMEOUT, "the end of the ranks")
