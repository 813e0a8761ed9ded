"""A DAG whose XComs lie in an object store; runs itself and prints what it read. For `test_xcom_backend`."""

import sys
from datetime import UTC, datetime

from airflow.sdk import DAG, task

from airflow_rankzero import torch_distributor


@torch_distributor(num_processes=1, conn_id="here", store=sys.argv[1])
def train() -> dict:
    import torch

    return {"weights": torch.arange(4.0)}


@torch_distributor(num_processes=1, conn_id="here", store=sys.argv[1])
def evaluate(model: dict) -> float:
    return float(model["weights"].sum())


@task
def check(model, total: float) -> None:
    assert total == 6.0
    assert model.load()["weights"].tolist() == [0.0, 1.0, 2.0, 3.0]


def make() -> DAG:
    """Values, references, and a reference as an argument of the next training."""
    with DAG("object_storage", schedule=None, start_date=datetime(2026, 1, 1, tzinfo=UTC)) as dag:
        trained = train()
        check(trained, evaluate(trained))
    return dag


if __name__ == "__main__":
    from tests.airflow.conftest import register

    made = make()
    register(made)
    # In one piece: listeners of the plugin may write at the same time.
    print(f"ended: {made.test().state}\n", end="")
