"""Tasks whose connection is a Spark Connect server: the same operator, tries and results, without a JVM beside them."""

import json
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


def test_the_test_of_a_connection_starts_ranks_that_look_around(
    server: ConnectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from airflow_rankzero.hooks import RankZeroHook

    monkeypatch.setenv("RANKZERO_TIME_SCALE", "8")

    def told(**extra: Any) -> tuple[bool, str]:
        fields = {"conn_type": "rankzero", "host": server.url, "extra": {"store": str(tmp_path), **extra}}
        monkeypatch.setenv("AIRFLOW_CONN_RANKS", json.dumps(fields))
        return RankZeroHook("ranks").test_connection()

    ok, words = told()
    assert ok, words
    assert "2 ranks ran at the same time" in words
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
