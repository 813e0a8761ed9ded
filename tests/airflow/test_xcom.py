"""The value of a training as an XCom: other tasks pull what rank 0 returned, or its handle, whatever its parts are."""

import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.airflow import versions
from tests.airflow.database import migrate
from tests.conftest import ROOT
from tests.postgres import Postgres, find_programs

RunDag = Callable[..., Any]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[str]:
    """The URL of a database of its own: PostgreSQL where it is installed, else SQLite."""
    programs = find_programs() if importlib.util.find_spec("psycopg2") else None
    if programs is None:
        yield f"sqlite:///{tmp_path}/airflow.db"
        return
    server = Postgres(programs)
    yield server.url
    server.stop()


def test_every_value_that_is_pushed_is_pulled_unchanged(dag: Any, run_dag: RunDag) -> None:
    versions.needs(3, 3, "these names of the ways that an XCom goes")
    from airflow.sdk import task
    from tests.airflow.xcom_round_trip import Way, assert_values_come_back

    @task
    def train() -> None:
        """The task instance to which the XComs belong."""

    train()
    outcome = run_dag(dag)
    # Each takes four requests to Airflow's server; the next test has more of them every night.
    assert_values_come_back(Way(dag.dag_id, outcome.run_id, "train", sqlite=True), examples=40)


@pytest.mark.soak
def test_every_value_that_is_pushed_to_a_server_s_database_is_pulled_unchanged(database: str, tmp_path: Path) -> None:
    versions.needs(3, 3, "these names of the ways that an XCom goes")
    env = {
        **os.environ,
        "AIRFLOW_HOME": str(tmp_path),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": database,
        "PYTHONPATH": str(ROOT),
    }
    migrate(env)
    program = Path(__file__).with_name("xcom_round_trip.py")
    done = subprocess.run([sys.executable, program], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("every value came back\n")


def metrics(**more: Any) -> dict[str, Any]:
    import numpy
    import torch

    return {"acc": numpy.float64(0.5), "steps": numpy.int32(3), "loss": torch.tensor(0.25), **more}


def test_a_task_pulls_numbers_of_numpy_and_torch_as_its_own(dag: Any, run_dag: RunDag, tmp_path: Path) -> None:
    from airflow.sdk import task

    from airflow_rankzero import TorchDistributorOperator
    from rankzero import RunHandle

    train = TorchDistributorOperator(
        task_id="train", train=metrics, num_processes=1, conn_id="here", store=str(tmp_path), multiple_outputs=True
    )

    @task
    def read(found: dict, loss: float) -> list[str]:
        assert found == {"acc": 0.5, "steps": 3, "loss": loss}
        return [type(value).__name__ for value in found.values()]

    read(train.output, train.output["loss"])
    outcome = run_dag(dag)
    assert outcome.state == "success", outcome.errors
    assert sorted(outcome.xcom("read")) == ["float", "float", "int"]
    (job,) = tmp_path.glob("*/job.json")
    # The file keeps what was returned.
    assert type(RunHandle.attach(job.parent).result()["acc"]).__module__ == "numpy"


@pytest.mark.parametrize(
    "part",
    [
        math.nan,
        # What is refused, and so goes by reference, is checked without a training in `assert_values_come_back`.
        *(pytest.param(part, marks=pytest.mark.soak) for part in (2**64, "a\0b", {"__type": "adam", "__var": 1})),
    ],
    ids=str,
)
def test_a_value_that_airflow_cannot_carry_is_pulled_by_reference(
    dag: Any, run_dag: RunDag, tmp_path: Path, part: Any
) -> None:
    from airflow.sdk import task

    from airflow_rankzero import TorchDistributorOperator
    from rankzero import ResultRef

    train = TorchDistributorOperator(
        task_id="train", train=lambda: metrics(part=part), num_processes=1, conn_id="here", store=str(tmp_path)
    )

    @task
    def read(ref: ResultRef) -> bool:
        return repr(ref.load()["part"]) == repr(part)

    read(train.output)
    outcome = run_dag(dag)
    assert outcome.xcom("read") is True, outcome.errors


def test_a_task_is_mapped_over_a_large_list(dag: Any, run_dag: RunDag, tmp_path: Path) -> None:
    from airflow.sdk import task

    from airflow_rankzero import TorchDistributorOperator

    train = TorchDistributorOperator(
        task_id="train", train=lambda: ["a" * 70_000, "b"], num_processes=1, conn_id="here", store=str(tmp_path)
    )

    @task
    def measure(text: str) -> int:
        return len(text)

    measure.expand(text=train.output)
    outcome = run_dag(dag)
    assert outcome.state == "success", outcome.errors
    assert outcome.mapped_xcoms("measure") == [70_000, 1]


@pytest.mark.parametrize(
    ("value", "mapped", "why"),
    [
        ({"weights": [object()]}, False, "multiple_outputs=True pushes its keys"),
        ({"__classname__": "x.Y"}, False, "it has the key '__classname__'"),
        ({"loss": math.nan}, False, "['loss'] is nan"),
        ("text", False, "it is no dict"),
        ({"run_directory": "/mine"}, False, "its key 'run_directory' is the XCom of the run directory"),
        ({"loss": 0.1, "loss#1": 0.3}, False, "its key 'loss#1' cannot be the key of an XCom"),
        (0.5, True, "neither a list nor a dict"),
        (list(range(1025)), True, "max_map_length is 1024"),
    ],
)
def test_a_value_that_cannot_be_taken_apart_spends_no_retry(
    dag: Any, run_dag: RunDag, tmp_path: Path, value: Any, mapped: bool, why: str
) -> None:
    from airflow.sdk import task

    from airflow_rankzero import TorchDistributorOperator

    train = TorchDistributorOperator(
        task_id="train",
        train=lambda: value,
        num_processes=1,
        conn_id="here",
        store=str(tmp_path),
        multiple_outputs=not mapped,
        retries=3,
    )
    if mapped:
        task(task_id="each")(lambda item: item).expand(item=train.output)
    outcome = run_dag(dag)
    assert outcome.task_state("train") == "failed"
    assert type(outcome.errors["train"]).__name__ == "AirflowFailException"
    assert why in str(outcome.errors["train"])


def test_a_handle_that_is_used_as_its_value_says_how_to_load_it() -> None:
    from rankzero import ResultRef

    ref = ResultRef("/store/value.torch", "torch", "", 1, {"type": "dict"})
    for use in (lambda: ref["acc"], lambda: len(ref), lambda: list(ref)):
        with pytest.raises(TypeError, match=r"handle of a stored dict.*\.load\(\)"):
            use()
    assert ref
