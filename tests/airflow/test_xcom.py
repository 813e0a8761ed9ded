"""The value of a training as an XCom: other tasks pull what rank 0 returned, or its handle, whatever its parts are."""

import math
from pathlib import Path
from typing import Any

import pytest
from tests.airflow import versions
from tests.airflow.versions import RunDag


def test_every_value_that_is_pushed_is_pulled_unchanged(dag: Any, run_dag: RunDag) -> None:
    versions.needs(3, 3, "these names of the ways that an XCom goes")
    from airflow.sdk import task
    from tests.airflow.xcom_round_trip import Way, assert_values_come_back

    @task
    def train() -> None:
        """The task instance to which the XComs belong."""

    train()
    outcome = run_dag(dag)
    assert_values_come_back(Way(dag.dag_id, outcome.run_id, "train"))


def metrics(**more: Any) -> dict[str, Any]:
    import numpy
    import torch

    return {"acc": numpy.float64(0.5), "steps": numpy.int32(3), "loss": torch.tensor(0.25), **more}


def test_a_task_pulls_numbers_of_numpy_and_torch_as_its_own(
    dag: Any, run_dag: RunDag, tmp_path: Path, operator: Any
) -> None:
    from airflow.sdk import task

    from rankzero import RunHandle

    train = operator(metrics, multiple_outputs=True)

    @task
    def read(found: dict, loss: float) -> list[str]:
        assert found == {"acc": 0.5, "steps": 3, "loss": loss}
        return [type(value).__name__ for value in found.values()]

    read(train.output, train.output["loss"])
    outcome = run_dag(dag)
    assert outcome.state == "success", outcome.errors
    assert sorted(outcome.xcom("read")) == ["float", "float", "int"]
    (job,) = tmp_path.glob("*/submissions/0.json")
    # The file keeps what was returned.
    assert type(RunHandle.attach(job.parents[1]).result()["acc"]).__module__ == "numpy"


def test_a_task_is_mapped_over_a_large_list(dag: Any, run_dag: RunDag, operator: Any) -> None:
    from airflow.sdk import task

    train = operator(lambda: ["a" * 70_000, "b"])

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
        ({"__classname__": "x.Y"}, False, "would return {'classname__': 'x.Y'}"),
        ({"loss": math.nan}, False, "would return {'loss': 'nan'}"),
        ("text", False, "it is no dict"),
        ({"run_directory": "/mine"}, False, "its key 'run_directory' is the XCom of the run directory"),
        ({"loss": 0.1, "loss#1": 0.3}, False, "its key 'loss#1' cannot be the key of an XCom"),
        (0.5, True, "neither a list nor a dict"),
        (list(range(1025)), True, "max_map_length is 1024"),
    ],
)
def test_a_value_that_cannot_be_taken_apart_spends_no_retry(
    dag: Any, run_dag: RunDag, value: Any, mapped: bool, why: str, operator: Any
) -> None:
    from airflow.sdk import task

    train = operator(lambda: value, multiple_outputs=not mapped, retries=3)
    if mapped:
        task(task_id="each")(lambda item: item).expand(item=train.output)
    outcome = run_dag(dag)
    assert outcome.task_state("train") == "failed"
    assert type(outcome.errors["train"]).__name__ == "AirflowFailException"
    assert why in str(outcome.errors["train"])
