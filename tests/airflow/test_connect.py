"""The test of a connection to a Spark Connect server."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.contract.engines.connect_server import ConnectServer


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
