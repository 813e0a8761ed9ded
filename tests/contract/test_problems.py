"""The problems that one machine finds before a training starts, without a JVM and without a process."""

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankzero import LocalEngine, SparkEngine
from rankzero.doctor.examine import find_problems


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Taken, so that no other process listens there meanwhile; a connection is refused."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.mark.parametrize(
    ("master", "store", "more", "words"),
    [
        ("spark://127.0.0.1:{open}", "{folder}", {}, None),
        # One of several masters is enough.
        ("spark://127.0.0.1:{closed},127.0.0.1:{open}", "{folder}", {}, None),
        (None, "memory://of-the-problems/runs", {}, None),
        ("spark://127.0.0.1:{closed}", "{folder}", {}, r"127.0.0.1:\d+ does not answer.*refused"),
        (None, "{folder}", {"use_gpu": True, "processes_per_task": 2}, "needs 2 GPUs"),
        ("local[2]", "{folder}", {"use_gpu": True, "processes_per_task": 2}, "needs 2 GPUs"),
        (None, "{folder}/file/runs", {}, r"cannot be written \(NotADirectoryError"),
        # Not even root makes a file there.
        (None, "/proc/runs", {}, "store '/proc/runs' cannot be written"),
        ("spark://127.0.0.1:{closed}", "nosuch://bucket", {}, "cannot be reached.*'nosuch://bucket' cannot be written"),
    ],
)
def test_each_problem_is_found_and_nothing_is_started(
    listener: int,
    closed_port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    master: str | None,
    store: str,
    more: dict[str, Any],
    words: str | None,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    started: list[Any] = []
    monkeypatch.setattr("subprocess.Popen.__init__", lambda self, *args, **kwargs: started.append(args))
    (tmp_path / "file").touch()
    names = {"open": listener, "closed": closed_port, "folder": tmp_path}
    engine = SparkEngine(master=master.format(**names)) if master else LocalEngine()
    found = "; ".join(find_problems(engine, store.format(**names), **more))
    assert re.search(words, found) if words else not found, found
    assert started == []
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_missing_java_is_found(listener: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "Spark needs Java" in str(find_problems(SparkEngine(master=f"spark://127.0.0.1:{listener}"), str(tmp_path)))


def test_a_silent_master_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a firewall that drops packets."""
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.1")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        address = silent.getsockname()
        # The kernel accepts connections for the queue; with a full queue it drops their packets.
        waiting = [socket.socket() for _ in range(4)]
        try:
            for each in waiting:
                each.setblocking(False)
                each.connect_ex(address)
            found = find_problems(SparkEngine(master=f"spark://127.0.0.1:{address[1]}"), str(tmp_path))
        finally:
            for each in waiting:
                each.close()
    assert "did not answer within 0.3 s" in str(found)
