"""The trackers of `example_dags/trackers.py`, in real runs, with a real webhook and a real UDP socket."""

import http.server
import importlib.util
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.conftest import ROOT

from rankzero import Launcher, WorkerFailedError


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trackers", ROOT / "example_dags" / "trackers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Hook(http.server.ThreadingHTTPServer):
    """A webhook that refuses the first post."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.texts: list[str] = []
        self.is_refused = False

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.server.is_refused:
            self.server.is_refused = True
            self.send_error(503)
            return
        self.server.texts.append(body["text"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[Hook]:
    server = Hook()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def statsd() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.setblocking(False)
        yield server


def received(server: socket.socket) -> list[str]:
    datagrams = []
    try:
        while True:
            datagrams.append(server.recv(65536).decode())
    except BlockingIOError:
        return datagrams


def test_a_restarted_run_reaches_a_webhook_that_was_away_and_statsd(
    example: ModuleType, hook: Hook, statsd: socket.socket, tmp_path: Path, training: Callable[..., Any]
) -> None:
    def train_and_fail() -> None:
        training(0.5)
        raise ValueError("no luck\nsecond line")

    trackers = [example.Webhook(hook.address), example.StatsD(port=statsd.getsockname()[1], prefix="digits")]
    launcher = Launcher(2, store=tmp_path, run_id="one", max_restarts=1, trackers=trackers)
    with pytest.raises(WorkerFailedError):
        launcher.run(train_and_fail)
    restart, end = hook.texts
    assert restart.startswith("run one is restarted: ")
    assert end.startswith("run one has failed: ")
    assert "no luck" in end
    lines = received(statsd)
    assert [line for line in lines if line.endswith("|c")] == [
        "digits.attempts:1|c",
        "digits.restarts.killed:1|c",
        "digits.attempts:1|c",
        "digits.runs.failed:1|c",
    ]
    assert "digits.metric.loss:0.25|g" in lines
    assert [line.split(":")[0] for line in lines if line.endswith("|ms")] == ["digits.run"]


def test_a_standstill_is_posted_once_until_there_is_progress(example: ModuleType, hook: Hook) -> None:
    hook.is_refused = True
    tracker, run = example.Webhook(hook.address, no_progress=0.0), SimpleNamespace(id="one")
    tracker.begin(run)
    tracker.add(run, [])
    tracker.add(run, [])
    tracker.add(run, [{"type": "metric"}])
    assert [text.partition(":")[0] for text in hook.texts] == ["run one makes no progress"] * 2
