"""The trackers of `example_dags/trackers.py`, in real runs, with a real webhook and a real UDP socket."""

import http.server
import importlib.util
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
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


@dataclass
class Hook:
    """A webhook that refuses the first post: its address, and the texts that were posted."""

    address: str = ""
    texts: list[str] = field(default_factory=list)
    is_refused: bool = False


@pytest.fixture
def hook() -> Iterator[Hook]:
    hook = Hook()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"]
            # Before the answer: the next post may come on another thread at once.
            status, hook.is_refused = (200 if hook.is_refused else 503), True
            hook.texts += [text] * (status == 200)
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hook.address = f"http://127.0.0.1:{server.server_address[1]}/hook"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield hook
        server.shutdown()


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
    example: ModuleType, hook: Hook, statsd: socket.socket, tmp_path: Path
) -> None:
    def train_and_fail() -> None:
        import rankzero.train as rt

        for step in range(2):
            rt.report({"step": step, "loss": 0.5 / (step + 1)})
        rt.barrier()
        if (rt.get_context().attempt, rt.get_context().rank) == (0, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        rt.barrier()
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
