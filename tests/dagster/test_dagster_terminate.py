"""Terminating a run in a real `dagster dev` (webserver and daemon) ends the ranks on Spark."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from tests.conftest import free_port, processes_with, until, wait_until_gone

DEFINITIONS = Path(__file__).parent / "endless_training.py"
RANKS = 2
GONE_WITHIN = 3.0

LAUNCH = """
mutation($params: ExecutionParams!) {
  launchRun(executionParams: $params) {
    __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message stack }
  }
}"""
TERMINATE = """
mutation($id: String!) {
  terminateRun(runId: $id, terminatePolicy: SAFE_TERMINATE) {
    __typename ... on TerminateRunFailure { message } ... on PythonError { message stack }
  }
}"""


class Webserver:
    """A running `dagster dev`."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def answers(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self._url}/server_info", timeout=5) as response:
            return response.status == 200
        return False

    def query(self, text: str, **variables: Any) -> dict[str, Any]:
        body = json.dumps({"query": text, "variables": variables}).encode()
        request = urllib.request.Request(f"{self._url}/graphql", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
        assert "errors" not in answer, answer
        return answer["data"]

    def status(self, run_id: str) -> str:
        text = "query($id: ID!) { runOrError(runId: $id) { ... on Run { status } } }"
        return self.query(text, id=run_id)["runOrError"]["status"]


@pytest.fixture
def webserver(tmp_path: Path, marker: str, dagster_home: Path) -> Iterator[Webserver]:
    """`dagster dev` with an instance of its own; nothing of it is left afterwards."""
    port = free_port()
    # Only ranks get the resource's `env`; everything that is started here carries the other mark.
    variables = {
        "TEST_STORE": str(tmp_path / "runs"),
        "TEST_ASSETS": str(tmp_path / "assets"),
        "TEST_RANK_MARK": f"of-{marker}",
        "TEST_SERVER_MARK": marker,
    }
    command = [sys.executable, "-m", "dagster", "dev", "-f", str(DEFINITIONS), "-h", "127.0.0.1", "-p", str(port)]
    with open(tmp_path / "dagster-dev.log", "wb") as log:
        # Not from a shell's background, which ignores SIGINT: Dagster would then ignore SIGTERM too.
        server = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **variables}, start_new_session=True, cwd=tmp_path
        )
    try:
        web = Webserver(port)
        until(lambda: server.poll() is None and web.answers(), 90, "a webserver that answers")
        yield web
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        for pid in processes_with(f"TEST_SERVER_MARK={marker}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_terminating_a_run_ends_its_ranks_and_stores_nothing(webserver: Webserver, marker: str, tmp_path: Path) -> None:
    rank_mark = f"ENDLESS_RANK=of-{marker}"
    selector = {
        "repositoryLocationName": DEFINITIONS.name,
        "repositoryName": "__repository__",
        "pipelineName": "train",
    }
    launched = webserver.query(LAUNCH, params={"selector": selector, "mode": "default", "runConfigData": {}})
    assert launched["launchRun"]["__typename"] == "LaunchRunSuccess", launched
    run_id = launched["launchRun"]["run"]["runId"]

    def training() -> bool:
        logs = list((tmp_path / "runs").glob("*/logs/rank-*.log"))
        assert webserver.status(run_id) not in ("FAILURE", "SUCCESS", "CANCELED")
        return sum("training" in log.read_text() for log in logs) == RANKS

    until(training, 150, "ranks that train")
    assert len(processes_with(rank_mark)) >= RANKS

    called = time.monotonic()
    terminated = webserver.query(TERMINATE, id=run_id)
    assert terminated["terminateRun"]["__typename"] == "TerminateRunSuccess", terminated
    left = wait_until_gone(rank_mark, timeout=GONE_WITHIN - (time.monotonic() - called))
    took = time.monotonic() - called
    assert left == [], f"ranks {left} still run {took:.2f} s after the call"
    print(f"ranks were gone {took:.2f} s after the call")

    until(lambda: webserver.status(run_id) == "CANCELED", 60, "a canceled run")
    assert not list((tmp_path / "assets").rglob("manifest.json"))
    with dg.DagsterInstance.get() as instance:
        assert instance.get_latest_materialization_event(dg.AssetKey("endless")) is None
    (status,) = (tmp_path / "runs").glob("*/status.json")
    assert json.loads(status.read_text())["state"] == "cancelled"
