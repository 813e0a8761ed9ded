"""The Prefect integration of `example_integrations`, with a real server and runner: `make test-frameworks`."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import servers
from tests.conftest import ROOT, free_port, until

from rankzero import RunHandle

INSTALLED = ROOT / ".frameworks" / "prefect" / "site-packages"
EXAMPLES = ROOT / "example_integrations"
FLOW = ROOT / "tests/doors/frameworks/prefect_flow.py"
PUBLIC = {"rankzero", "rankzero.pipeline", "rankzero.errors", "rankzero.tracking"}
WAIT = 240.0

needs_prefect = [
    pytest.mark.skipif(not INSTALLED.exists(), reason="Prefect is not installed: make test-frameworks"),
    pytest.mark.timeout(900),
]


def test_an_integration_needs_120_lines_and_only_the_public_interface() -> None:
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 120, path
        imported = {node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
        imported |= {
            name.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for name in node.names
        }
        ours = {name for name in imported if name and name.split(".")[0] == "rankzero"}
        assert ours, path
        assert ours <= PUBLIC, path


class Prefect:
    """A server of Prefect and a runner that serves one deployment."""

    def __init__(self, home: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}/api"
        self.home = home
        self.environment = {
            **os.environ,
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": self.url,
            "PREFECT_RUNNER_POLL_FREQUENCY": "1",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
            "PYTHONPATH": os.pathsep.join(map(str, [INSTALLED, EXAMPLES])),
        }
        self.processes: list[Any] = []

    def start(self, *arguments: str) -> None:
        command = [sys.executable, *arguments]
        self.processes.append(servers.start(*command, log=self.home / "log", env=self.environment, cwd=self.home))

    def ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.load(reply)

    def find(self, path: str) -> Any:
        assert all(process.poll() is None for process in self.processes), self.log()
        try:
            return self.ask(path)
        except OSError:
            return None

    def log(self) -> str:
        return (self.home / "log").read_text()

    def until(self, look: Callable[[], Any], what: str) -> Any:
        try:
            return until(look, WAIT, what, pause=0.2)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None

    def output_of_failure(self, *arguments: Path | str) -> str:
        """Runs a flow that fails in a process of its own, and returns what that prints."""
        command = [sys.executable, str(FLOW), *map(str, arguments)]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=WAIT)
        assert done.returncode == 1
        return done.stdout + done.stderr

    def run(self, folder: Path) -> str:
        """Starts a run of the flow, and returns its id when its ranks train."""
        state = {"type": "SCHEDULED"}
        body = {"parameters": {"folder": str(folder)}, "state": state}
        found = self.ask(f"deployments/{self.deployment}/create_flow_run", body)
        self.until(lambda: (folder / "began-0").exists() and (folder / "began-1").exists(), "the ranks train")
        return str(found["id"])

    def await_state(self, flow_run: str, name: str) -> Any:
        def ended() -> Any:
            found = self.ask(f"flow_runs/{flow_run}")
            return found["state_name"] in ("Completed", "Failed", "Cancelled") and found

        found = self.until(ended, f"the flow run is {name}")
        assert found["state_name"] == name, self.log()
        return found

    @property
    def deployment(self) -> str:
        return str(self.until(lambda: self.find("deployments/name/pipeline/local"), "the flow is served")["id"])


@pytest.fixture(scope="module")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefect]:
    prefect = Prefect(tmp_path_factory.mktemp("prefect"))
    try:
        prefect.start("-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", prefect.url[17:-4])
        prefect.until(lambda: prefect.find("health"), "the server replies")
        prefect.start(str(FLOW))
        yield prefect
    finally:
        servers.stop(prefect.processes)


def run_of(folder: Path, flow_run: str) -> RunHandle[Any]:
    return RunHandle.attach(f"{folder}/runs/{flow_run}-train")


@pytest.mark.usefixtures("prefect")
class TestPrefect:
    pytestmark = needs_prefect

    def test_a_retry_attaches_to_the_training_of_a_killed_process_and_delivers_its_result(
        self, prefect: Prefect, tmp_path: Path
    ) -> None:
        flow_run = prefect.run(tmp_path)
        before = (tmp_path / "process").read_text()
        driver = run_of(tmp_path, flow_run).status().driver_pid
        os.kill(int(before), signal.SIGKILL)
        prefect.until(lambda: "attached to the run" in prefect.log(), "the retry attaches")
        assert (tmp_path / "process").read_text() != before
        assert run_of(tmp_path, flow_run).status().driver_pid == driver
        (tmp_path / "may-finish").touch()
        # The second try fails after the training, and the third one gets the result without a training.
        assert prefect.await_state(flow_run, "Completed")["run_count"] == 3
        assert (tmp_path / "delivered").read_text() == "0.5 0.5 "
        assert [(tmp_path / f"began-{rank}").read_text() for rank in range(2)] == ["once ", "once "]
        assert "[0] training" in prefect.log()
        tables = prefect.ask("artifacts/filter", {"artifacts": {"key": {"any_": ["rankzero-metrics"]}}})
        assert {table["data"] for table in tables} == {json.dumps([{"loss": 0.25}])}

    def test_a_cancel_in_prefect_ends_the_training(self, prefect: Prefect, tmp_path: Path) -> None:
        flow_run = prefect.run(tmp_path)
        prefect.ask(f"flow_runs/{flow_run}/set_state", {"state": {"type": "CANCELLING"}})
        prefect.await_state(flow_run, "Cancelled")
        assert run_of(tmp_path, flow_run).status().state == "cancelled"
        assert not (tmp_path / "delivered").exists()

    def test_a_failed_training_is_tried_again_and_wrong_arguments_are_not(
        self, prefect: Prefect, tmp_path: Path
    ) -> None:
        failed = prefect.output_of_failure(tmp_path)
        assert "Retry 1/1" in failed
        assert "InvalidJobError" not in failed
        mistaken = prefect.output_of_failure(tmp_path, "one argument too many")
        assert "InvalidJobError" in mistaken
        assert "Retry 1/1" not in mistaken

    def test_each_training_of_a_flow_run_has_its_own_name(self, prefect: Prefect, tmp_path: Path) -> None:
        output = prefect.output_of_failure(tmp_path, "several")
        assert "values 2 4" in output
        assert "InvalidJobError: this flow run has already trained under the name 'train'" in output
        assert "Retry 1/1" not in output
        assert len(list((tmp_path / "runs").iterdir())) == 2
