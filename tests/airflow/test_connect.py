"""Tasks whose connection is a Spark Connect server: the same operator, tries and results, without a JVM beside them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.airflow.test_airflow_tries_table import Airflow, airflow, ended, killed  # noqa: F401 - a fixture
from tests.engines.connect_server import ConnectServer

CONNECTION = "connect"


@pytest.fixture(autouse=True)
def connection(server: ConnectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its own provider has it."""
    fields = {"conn_type": "spark_connect", "host": server.host, "port": server.port, "login": "ann"}
    monkeypatch.setenv("AIRFLOW_CONN_CONNECT", json.dumps(fields))
    monkeypatch.setenv("TEST_CONN_ID", CONNECTION)


# By default: the connection's test below, and trainings on such a server in `tests/engines/test_connect.py`.
@pytest.mark.soak
def test_a_result_goes_from_task_to_task_also_of_a_deferred_one(
    dag: Any, run_dag: Callable[..., Any], tmp_path: Path
) -> None:
    from airflow_rankzero import TorchDistributorOperator

    # Here: this module is nothing that executors could import.
    def make_weights(scale: float) -> dict[str, Any]:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.full((3,), scale * (dist.get_rank() + 1))
        dist.all_reduce(total)
        return {"weights": total}

    def total_of(given: dict[str, Any]) -> float:
        return float(given["weights"].sum())

    common: dict[str, Any] = {"conn_id": CONNECTION, "store": str(tmp_path)}
    train = TorchDistributorOperator(task_id="train", train=make_weights, op_args=[2.0], deferrable=True, **common)
    TorchDistributorOperator(task_id="report", train=total_of, op_args=[train.output], **common)
    outcome = run_dag(dag)
    assert outcome.state == "success", outcome.errors
    assert outcome.xcom("train").format == "torch"
    assert outcome.xcom("report") == 18.0


def test_the_test_of_a_connection_starts_ranks_that_look_around(
    server: ConnectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from airflow_rankzero.hooks.rankzero import RankZeroHook

    monkeypatch.setattr("airflow_rankzero.hooks.rankzero.TEST_START_TIMEOUT", 240.0)

    def told(**extra: Any) -> tuple[bool, str]:
        fields = {"conn_type": "rankzero", "host": server.url, "extra": {"store": str(tmp_path), **extra}}
        monkeypatch.setenv("AIRFLOW_CONN_RANKS", json.dumps(fields))
        return RankZeroHook("ranks").test_connection()

    ok, words = told()
    assert ok, words
    assert "by 2 ranks" in words
    assert "all-reduce: " in words
    # Whoever tests wants no run.
    assert list(tmp_path.iterdir()) == []
    ok, words = told(use_gpu=True)
    assert not ok
    assert "GPU" in words


@pytest.mark.soak
def test_the_try_after_a_killed_one_attaches(airflow: Airflow) -> None:  # noqa: F811
    killed(airflow)
    airflow.place.assert_outcome("attaches", airflow.xcom())


@pytest.mark.soak
def test_a_task_that_a_user_fails_ends_its_ranks(airflow: Airflow) -> None:  # noqa: F811
    ended(airflow)
    airflow.place.assert_outcome("ends", airflow.xcom())
