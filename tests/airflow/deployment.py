"""A whole Airflow as processes: API server, scheduler (LocalExecutor), DAG processor, triggerer; and its REST API."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, cast

from tests import servers
from tests.conftest import ROOT, free_port, processes_with, until
from tests.postgres import Postgres, find_programs
from tests.servers import STOP_TIMEOUT

from rankzero import RunHandle

DAGS = Path(__file__).parent / "dags"
START_TIMEOUT = 180.0
RUN_TIMEOUT = 240.0
HEARTBEAT = 1  # Seconds between two signs of life of a task, with which Airflow tells it what users did

SILENCE = 10  # Seconds after which Airflow counts a task without a sign of life as dead

USER = "admin"

COMPONENTS = ("api-server", "scheduler", "dag-processor", "triggerer")

# Most looks are requests to the API server, and cost it more than the wait does.
wait_until = functools.partial(until, pause=0.2)


class Deployment:
    """A running Airflow, on PostgreSQL where it is installed, else on SQLite."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self.store = home / "store"
        self.marker = f"airflow-{secrets.token_hex(8)}"
        self.url = f"http://127.0.0.1:{free_port()}"
        self.token = ""
        self._password = secrets.token_hex(8)
        self._components: dict[str, subprocess.Popen[bytes]] = {}
        programs = find_programs() if importlib.util.find_spec("psycopg2") else None
        self.postgres = Postgres(programs) if programs else None
        self._env = self._environment()
        try:
            subprocess.run([sys.executable, "-m", "airflow", "db", "migrate"], env=self._env, cwd=ROOT, check=True)
            for name in COMPONENTS:
                command, log = (sys.executable, "-m", "airflow", name), home / f"{name}.log"
                self._components[name] = servers.start(*command, log=log, env=self._env, cwd=ROOT)
        except BaseException:
            self.stop()
            raise

    def _passwords(self) -> Path:
        path = self._home / "passwords.json"
        path.write_text(json.dumps({USER: self._password}))
        return path

    def _environment(self) -> dict[str, str]:
        settings = {
            "CORE__DAGS_FOLDER": str(DAGS),
            "CORE__LOAD_EXAMPLES": "False",
            "CORE__EXECUTOR": "LocalExecutor",
            "CORE__PARALLELISM": "4",
            "CORE__SIMPLE_AUTH_MANAGER_USERS": f"{USER}:admin",
            "CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(self._passwords()),
            "CORE__EXECUTION_API_SERVER_URL": f"{self.url}/execution/",
            "DATABASE__SQL_ALCHEMY_CONN": self.postgres.url if self.postgres else f"sqlite:///{self._home}/airflow.db",
            "API__HOST": "127.0.0.1",
            "API__PORT": self.url.rpartition(":")[2],
            "API__BASE_URL": self.url,
            "API__WORKERS": "1",
            "API_AUTH__JWT_SECRET": secrets.token_hex(64),
            "LOGGING__WORKER_LOG_SERVER_PORT": str(free_port()),
            "LOGGING__TRIGGER_LOG_SERVER_PORT": str(free_port()),
            # Each of its loops costs some 30 ms of processor time.
            "SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.4",
            "SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": str(SILENCE),
            "SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "2",
            "TRIGGERER__JOB_HEARTBEAT_SEC": "2",
            "WORKERS__MIN_HEARTBEAT_INTERVAL": str(HEARTBEAT),
            # A task that waits in vain for the API server of a busy machine fails before it has begun.
            "WORKERS__EXECUTION_API_TIMEOUT": "30",
            "DAG_PROCESSOR__REFRESH_INTERVAL": "5",
        }
        return {
            **os.environ,
            **{f"AIRFLOW__{name}": value for name, value in settings.items()},
            "AIRFLOW_HOME": str(self._home),
            "AIRFLOW_CONN_HERE": json.dumps({"conn_type": "rankzero", "extra": {"engine": "local"}}),
            "RANKZERO_STORE": str(self.store),
            "AIRFLOW_OF_TEST": self.marker,
        }

    def _check_alive(self) -> None:
        for name, process in self._components.items():
            assert process.poll() is None, f"{name} ended: {(self._home / f'{name}.log').read_text()[-3000:]}"

    # -- its REST API --------------------------------------------------------------------------

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """One request; the answer's JSON, or None."""
        with self._open(method, path, body) as answer:
            return json.loads(answer.read() or "null")

    def _open(self, method: str, path: str, body: dict[str, Any] | None = None) -> HTTPResponse:
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"},
        )
        return cast(HTTPResponse, urllib.request.urlopen(request, timeout=60))

    def _probe(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            return self.call(method, path, body)
        except (urllib.error.URLError, OSError, ValueError):
            self._check_alive()
            return None

    def wait_until_ready(self, dag_ids: list[str]) -> None:
        """Until every component shows signs of life and the DAGs are there and switched on."""
        login = ("POST", "/auth/token", {"username": USER, "password": self._password})
        token = wait_until(lambda: self._probe(*login), START_TIMEOUT, "the API server")
        self.token = token["access_token"]
        for dag_id in dag_ids:
            unpause = ("PATCH", f"/api/v2/dags/{dag_id}", {"is_paused": False})
            wait_until(lambda call=unpause: self._probe(*call), START_TIMEOUT, f"the DAG {dag_id}")
        wait_until(self._is_healthy, START_TIMEOUT, "healthy components")

    def _is_healthy(self) -> bool:
        self._check_alive()
        health = self._probe("GET", "/api/v2/monitor/health") or {}
        return all(health.get(name, {}).get("status") == "healthy" for name in ("scheduler", "triggerer"))

    def trigger(self, dag_id: str, **conf: Any) -> str:
        """Starts a DAG run; its id."""
        run = self.call("POST", f"/api/v2/dags/{dag_id}/dagRuns", {"logical_date": None, "conf": conf})
        return str(run["dag_run_id"])

    def finish(self, dag_id: str, run_id: str) -> str:
        """The state in which the DAG run ends."""
        deadline = time.monotonic() + RUN_TIMEOUT
        # One request, which lasts until then, costs the API server less than many do.
        with self._open("GET", f"/api/v2/dags/{dag_id}/dagRuns/{run_id}/wait?interval=0.2") as states:
            for line in states:
                last = json.loads(line)["state"]
                assert time.monotonic() < deadline, f"{dag_id} is still {last} after {RUN_TIMEOUT:g} s"
        return str(last)

    def task(self, dag_id: str, run_id: str, task_id: str) -> str:
        """Path of a task instance."""
        return f"/api/v2/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}"

    def look(self, dag_id: str, run_id: str, task_id: str) -> dict[str, Any]:
        """A task instance: ``state``, ``try_number`` and more."""
        return dict(self.call("GET", self.task(dag_id, run_id, task_id)))

    def mark(self, dag_id: str, run_id: str, task_id: str, state: str) -> None:
        """What a user does who marks a task as ``"failed"`` or ``"success"``."""
        self.call("PATCH", self.task(dag_id, run_id, task_id), {"new_state": state})

    def xcom(self, dag_id: str, run_id: str, task_id: str, key: str = "return_value") -> Any:
        """A value as the UI gets it."""
        return self.call("GET", self.task(dag_id, run_id, task_id) + f"/xcomEntries/{key}")["value"]

    def log(self, dag_id: str, run_id: str, task_id: str, try_number: int = 1) -> str:
        """The log of a try."""
        return str(self.call("GET", self.task(dag_id, run_id, task_id) + f"/logs/{try_number}?full_content=true"))

    def await_watch(self, dag_id: str, run_id: str) -> None:
        """Waits until the scheduler knows of the training of a DAG run."""
        words = f"the training of ('{dag_id}', '{run_id}'"
        wait_until(lambda: words in (self._home / "scheduler.log").read_text(), RUN_TIMEOUT, words)

    # -- what it started -----------------------------------------------------------------------

    def run_of(self, dag_id: str, run_id: str, task_id: str = "train") -> RunHandle[Any]:
        """The training run of a task, once it is there."""
        from airflow_rankzero.tries import run_id_of

        directory = self.store / run_id_of(dag_id, run_id, task_id, -1)
        wait_until((directory / "submissions" / "0.json").exists, RUN_TIMEOUT, "the run directory")
        return RunHandle.attach(directory)

    def task_process(self, dag_id: str, run_id: str, task_id: str) -> int:
        """The process of a running task."""
        return int(self.look(dag_id, run_id, task_id)["pid"])

    def stop(self) -> None:
        """Kills the components; what their tasks have started has to end by itself."""
        try:
            servers.stop([*self._components.values()], timeout=0)
            wait_until(lambda: not processes_with(self.marker), STOP_TIMEOUT, "the end of Airflow")
        finally:
            for pid in processes_with(self.marker):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if self.postgres:
                self.postgres.stop()
