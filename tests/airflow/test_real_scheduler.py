"""What only a real worker shows: pickling from its oddly named DAG modules, kills, other DAGs' pulls.

One ``airflow standalone`` (scheduler, API server, DAG processor, LocalExecutor on SQLite) serves the module.
"""

import functools
import json
import os
import secrets
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import free_port, processes_with, until

from rankzero import RunHandle

DAGS = Path(__file__).parent / "dags"
START_TIMEOUT = 120.0
RUN_TIMEOUT = 180.0
STOP_TIMEOUT = 15.0
HEARTBEAT = 1.0
GONE_WITHIN = 5.0
"""Seconds after which nothing of a run may be left."""

# Most looks are requests to the API server.
wait_until = functools.partial(until, pause=0.05)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Standalone:
    """A running Airflow and its REST interface."""

    def __init__(self, home: Path) -> None:
        self.store = home / "store"
        self.marker = f"airflow-{secrets.token_hex(8)}"
        self._url = f"http://127.0.0.1:{free_port()}"
        self._token = ""
        with open(home / "standalone.log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "airflow", "standalone"],
                env=self._environment(home),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _environment(self, home: Path) -> dict[str, str]:
        settings = {
            "CORE__DAGS_FOLDER": str(DAGS),
            "CORE__LOAD_EXAMPLES": "False",
            "CORE__EXECUTOR": "LocalExecutor",
            "CORE__PARALLELISM": "2",
            "CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
            "CORE__EXECUTION_API_SERVER_URL": f"{self._url}/execution/",
            "DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
            "API__HOST": "127.0.0.1",
            "API__PORT": self._url.rpartition(":")[2],
            "API__BASE_URL": self._url,
            "API__WORKERS": "1",
            "API_AUTH__JWT_SECRET": secrets.token_hex(64),
            "LOGGING__WORKER_LOG_SERVER_PORT": str(free_port()),
            "LOGGING__TRIGGER_LOG_SERVER_PORT": str(free_port()),
            "SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.1",
            "WORKERS__MIN_HEARTBEAT_INTERVAL": str(int(HEARTBEAT)),
            "DAG_PROCESSOR__REFRESH_INTERVAL": "5",
        }
        return {
            **os.environ,
            **{f"AIRFLOW__{name}": value for name, value in settings.items()},
            # Airflow starts its components by the name `airflow`.
            "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),
            "AIRFLOW_HOME": str(home),
            "RANKZERO_STORE": str(self.store),
            "AIRFLOW_OF_TEST": self.marker,
        }

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            self._url + path,
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def _probe(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            return self.call(method, path, body)
        except (urllib.error.URLError, OSError, ValueError):
            assert self._process.poll() is None, "airflow standalone ended"
            return None

    def wait_until_ready(self, dag_ids: list[str]) -> None:
        token = wait_until(lambda: self._probe("GET", "/auth/token"), START_TIMEOUT, "the API server")
        self._token = token["access_token"]
        for dag_id in dag_ids:
            unpause = ("PATCH", f"/api/v2/dags/{dag_id}", {"is_paused": False})
            wait_until(lambda call=unpause: self._probe(*call), START_TIMEOUT, f"the DAG {dag_id}")
        wait_until(self._is_healthy, START_TIMEOUT, "a healthy scheduler")

    def _is_healthy(self) -> bool:
        health = self._probe("GET", "/api/v2/monitor/health") or {}
        return bool(health.get("scheduler", {}).get("status") == "healthy")

    def trigger(self, dag_id: str, **conf: Any) -> str:
        run = self.call("POST", f"/api/v2/dags/{dag_id}/dagRuns", {"logical_date": None, "conf": conf})
        return str(run["dag_run_id"])

    def finish(self, dag_id: str, run_id: str) -> str:
        """The state in which the DAG run ends."""

        def state() -> str | None:
            now = self.call("GET", f"/api/v2/dags/{dag_id}/dagRuns/{run_id}")["state"]
            return str(now) if now in ("success", "failed") else None

        return str(wait_until(state, RUN_TIMEOUT, f"the end of {dag_id}"))

    def task(self, dag_id: str, run_id: str, task_id: str) -> str:
        return f"/api/v2/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}"

    def xcom(self, dag_id: str, run_id: str, task_id: str) -> Any:
        return self.call("GET", self.task(dag_id, run_id, task_id) + "/xcomEntries/return_value")["value"]

    def log(self, dag_id: str, run_id: str, task_id: str) -> str:
        return str(self.call("GET", self.task(dag_id, run_id, task_id) + "/logs/1?full_content=true"))

    def run_of(self, dag_id: str, run_id: str) -> RunHandle[Any]:
        """The training run that the task ``train`` has started."""
        pattern = f"{dag_id}__{run_id.replace(':', '-')}__train__try1-*"

        def directory() -> Path | None:
            return next((path for path in self.store.glob(pattern) if (path / "job.json").exists()), None)

        return RunHandle.attach(wait_until(directory, RUN_TIMEOUT, "the run directory"))

    def stop(self) -> None:
        os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(STOP_TIMEOUT)
            wait_until(lambda: not processes_with(self.marker), STOP_TIMEOUT, "the end of Airflow")
        finally:
            for pid in processes_with(self.marker):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    standalone = Standalone(tmp_path_factory.mktemp("standalone"))
    try:
        standalone.wait_until_ready(["shipped", "endless", "pulling"])
        yield standalone
    finally:
        standalone.stop()


def test_dag_file_function_trains_and_any_dag_pulls_its_result(airflow: Standalone) -> None:
    run_id = airflow.trigger("shipped")
    state = airflow.finish("shipped", run_id)
    log = airflow.log("shipped", run_id, "train")
    assert state == "success", log + airflow.log("shipped", run_id, "diverge")
    # The trap: nobody but the worker could have imported the function's module by its name.
    assert "[1] rank 1 of unusual_prefix_" in log
    # A nan, as a value and as a metric, is more than Airflow's XCom can hold.
    assert "ResultRef" in str(airflow.xcom("shipped", run_id, "diverge"))
    pulled = airflow.trigger("pulling", run_id=run_id)
    assert airflow.finish("pulling", pulled) == "success", airflow.log("pulling", pulled, "pull")
    assert airflow.xcom("pulling", pulled, "pull") == "85 nan"


@pytest.fixture
def endless(airflow: Standalone) -> Iterator[tuple[str, str, RunHandle[Any]]]:
    """A training that never ends and ignores SIGTERM: DAG run id, its ranks' marker, its run."""
    marker = f"endless-{secrets.token_hex(8)}"
    run_id = airflow.trigger("endless", mark=marker)
    run = airflow.run_of("endless", run_id)
    wait_until(lambda: run.status().state == "running", RUN_TIMEOUT, "the training")
    assert len(processes_with(marker)) >= 2
    wait_until(lambda: "[1] never ends" in airflow.log("endless", run_id, "train"), RUN_TIMEOUT, "live log lines")
    yield run_id, marker, run
    assert processes_with(marker) == []


def test_marking_a_task_failed_ends_its_ranks(airflow: Standalone, endless: tuple[str, str, RunHandle[Any]]) -> None:
    run_id, marker, run = endless
    airflow.call("PATCH", airflow.task("endless", run_id, "train"), {"new_state": "failed"})
    # Airflow tells the task with its next heartbeat.
    wait_until(lambda: not processes_with(marker), HEARTBEAT + GONE_WITHIN, "the end of the ranks")
    wait_until(lambda: run.status().final, STOP_TIMEOUT, "the end of the run")
    assert run.status().state == "cancelled"


def test_killed_task_process_takes_its_ranks_along(
    airflow: Standalone, endless: tuple[str, str, RunHandle[Any]]
) -> None:
    run_id, marker, run = endless
    driver = run.status().driver_pid
    assert driver is not None
    os.kill(parent_of(driver), signal.SIGKILL)
    wait_until(lambda: not processes_with(marker), GONE_WITHIN, "the end of the ranks")
    wait_until(lambda: run.status().final, STOP_TIMEOUT, "the end of the run")
    assert run.status().state == "cancelled"
    assert airflow.finish("endless", run_id) == "failed"
