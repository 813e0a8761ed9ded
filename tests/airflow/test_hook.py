"""What the test of a connection says, in words, without a JVM."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.airflow import versions


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Tests a connection the way Airflow does and returns what it says."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def test(host: str | None = None, **extra: Any) -> tuple[bool, str]:
        extra = {"store": str(tmp_path), **extra}
        given = {"conn_type": "rankzero", "host": host, "extra": extra}
        monkeypatch.setenv("AIRFLOW_CONN_CLUSTER", json.dumps(given))
        connection = versions.tested_connection()(
            conn_id="cluster", conn_type="rankzero", host=host, extra=json.dumps(extra)
        )
        return connection.test_connection()

    return test


def test_the_hook_gives_the_target(tell: Any) -> None:
    from airflow_rankzero.hooks import RankZeroHook

    tell(host="head")
    assert RankZeroHook("cluster").get_conn().master == "spark://head:7077"


def test_problems_and_the_lack_of_them_are_told(tell: Any, tmp_path: Path) -> None:
    ok, words = tell(engine="local")
    assert ok, words
    assert "no problem found" in words
    assert f"run directories in {tmp_path}" in words
    ok, words = tell(host="spark://head", store="nosuch://bucket", use_gpu=True, processes_per_task=2)
    assert not ok
    assert "'nosuch://bucket' cannot be written" in words
    ok, words = tell(engine="ray")
    assert not ok
    assert "engine 'ray'; choose spark or local" in words


def test_the_command_examines_a_connection(tell: Any, tmp_path: Path) -> None:
    """`rankzero doctor --conn-id`, by the entry point that this package has for it."""
    from click.testing import CliRunner

    from rankzero.cli import main

    tell(engine="local")
    told = CliRunner().invoke(main, ["doctor", "--conn-id", "cluster", "--json"])
    assert told.exit_code == 0, told.output
    examination = json.loads(told.stdout)
    assert examination["healthy"]
    assert len(examination["ranks"]) == 2
    assert list(tmp_path.iterdir()) == []
    told = CliRunner().invoke(main, ["doctor", "--conn-id", "nobody"])
    assert told.exit_code == 1
    assert "there is no connection conn_id='nobody'" in told.output
