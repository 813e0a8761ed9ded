"""What the test of a connection says, in words, without a JVM."""

import json
import socket
from collections.abc import Iterator
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


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Taken, so that nobody else listens there meanwhile; whoever connects is refused."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_the_hook_gives_the_target(tell: Any) -> None:
    from airflow_rankzero.hooks.rankzero import RankZeroHook

    tell(host="head")
    assert RankZeroHook("cluster").get_conn().master == "spark://head:7077"


def test_nothing_is_wrong(tell: Any, listener: int, tmp_path: Path) -> None:
    ok, words = tell(host=f"spark://127.0.0.1:{listener}")
    assert ok, words
    assert f"spark://127.0.0.1:{listener}" in words
    assert str(tmp_path) in words
    assert list(tmp_path.iterdir()) == []
    assert tell(engine="local") == (True, words.replace(f"spark://127.0.0.1:{listener}", "this machine"))


def test_one_of_several_masters_is_enough(tell: Any, listener: int, closed_port: int) -> None:
    ok, words = tell(host=f"spark://127.0.0.1:{closed_port},127.0.0.1:{listener}")
    assert ok, words


def test_master_that_refuses_is_named(tell: Any, closed_port: int) -> None:
    ok, words = tell(host=f"spark://127.0.0.1:{closed_port}")
    assert not ok
    assert f"127.0.0.1:{closed_port} does not answer" in words
    assert "refused" in words


def test_master_that_is_silent_is_not_waited_for(tell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a firewall that drops packets."""
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.1")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        address = silent.getsockname()
        # The kernel answers for whom waits in the queue; a full queue answers nobody.
        waiting = [socket.socket() for _ in range(4)]
        try:
            for each in waiting:
                each.setblocking(False)
                each.connect_ex(address)
            ok, words = tell(host=f"spark://127.0.0.1:{address[1]}")
        finally:
            for each in waiting:
                each.close()
    assert not ok
    assert "did not answer within 0.3 s" in words


def test_missing_java_is_told(tell: Any, listener: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    ok, words = tell(host=f"spark://127.0.0.1:{listener}")
    assert not ok
    assert "Spark needs Java" in words


@pytest.mark.parametrize("fields", [{"engine": "local"}, {"host": "local[2]"}])
def test_missing_gpus_are_told(tell: Any, fields: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ok, words = tell(use_gpu=True, processes_per_task=2, **fields)
    assert not ok
    assert "needs 2 GPUs" in words


def test_a_path_that_is_no_directory_is_told(tell: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ok, words = tell(engine="local", store=str(tmp_path / "file" / "runs"))
    assert not ok
    assert "cannot be written (NotADirectoryError" in words


def test_a_store_that_takes_no_file_is_told(tell: Any) -> None:
    # Not even root makes a file there.
    ok, words = tell(engine="local", store="/proc/runs")
    assert not ok
    assert "store '/proc/runs' cannot be written" in words


def test_an_object_store_takes_and_loses_an_object(tell: Any) -> None:
    import fsspec

    ok, words = tell(engine="local", store="memory://of-the-hook/runs")
    assert ok, words
    assert fsspec.filesystem("memory").find("/of-the-hook") == []
    ok, words = tell(engine="local", store="nosuch://bucket/runs")
    assert not ok
    assert "'nosuch://bucket/runs' cannot be written" in words


def test_all_problems_are_told_at_once(tell: Any, closed_port: int) -> None:
    ok, words = tell(host=f"spark://127.0.0.1:{closed_port}", store="nosuch://bucket")
    assert not ok
    assert "cannot be reached" in words
    assert "cannot be written" in words


def test_a_wrong_field_is_told(tell: Any) -> None:
    ok, words = tell(engine="ray")
    assert not ok
    assert "engine 'ray'; choose 'spark' or 'local'" in words


def test_no_jvm_and_no_heavy_import(tell: Any, listener: int, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr("subprocess.Popen.__init__", lambda self, *args, **kwargs: started.append(args))
    ok, words = tell(host=f"spark://127.0.0.1:{listener}")
    assert ok, words
    assert started == []


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
