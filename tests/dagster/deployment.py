"""A whole Dagster as processes: `dagster dev` (webserver, daemon, code server), and its GraphQL."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import secrets
import signal
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import servers
from tests.conftest import free_port, processes_with, until
from tests.postgres import Postgres, find_programs

START_TIMEOUT = 180.0
RUN_TIMEOUT = 180.0

FINAL = ("SUCCESS", "FAILURE", "CANCELED")

_LAUNCH = """
mutation($params: ExecutionParams!) {
  launchRun(executionParams: $params) {
    __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message stack }
  }
}"""
_TERMINATE = """
mutation($id: String!) {
  terminateRun(runId: $id, terminatePolicy: SAFE_TERMINATE) {
    __typename ... on TerminateRunFailure { message } ... on PythonError { message stack }
  }
}"""
_STATUS = "query($id: ID!) { runOrError(runId: $id) { ... on Run { status } } }"
_RUNS = """
query($filter: RunsFilter) { runsOrError(filter: $filter) { ... on Runs { results { runId status } } } }"""

# Most looks are requests to the webserver, and cost it more than the wait does.
wait_until = functools.partial(until, pause=0.2)

_SETTINGS = """
telemetry: {enabled: false}
run_monitoring: {enabled: true, poll_interval_seconds: 1}
run_retries: {enabled: true, max_retries: 0}
"""
_POSTGRES = """
storage:
  postgres: {postgres_url: "%s"}
"""


class Deployment:
    """A running `dagster dev`, on PostgreSQL where it is installed, else on SQLite."""

    def __init__(
        self,
        home: Path,
        definitions: Path,
        environment: Mapping[str, str],
        shell: Sequence[str] = (),
    ) -> None:
        """Starts it.

        Args:
            home: Its ``DAGSTER_HOME``, which must be there.
            definitions: File with the definitions.
            environment: Variables for them.
            shell: Words before its command, of a program that runs it.
        """
        self.home = home
        self.definitions = definitions
        self.marker = f"dagster-{secrets.token_hex(8)}"
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        programs = find_programs() if importlib.util.find_spec("dagster_postgres") else None
        self.postgres = Postgres(programs) if programs else None
        (home / "dagster.yaml").write_text(_SETTINGS + (_POSTGRES % self.postgres.url if self.postgres else ""))
        command = [sys.executable, "-m", "dagster", "dev", "-f", str(definitions), "-h", "127.0.0.1", "-p", str(port)]
        variables = {
            **os.environ,
            **environment,
            "DAGSTER_HOME": str(home),
            "DAGSTER_OF_TEST": self.marker,
            # A run that a busy machine starts slowly fails before it has begun.
            "DAGSTER_GRPC_TIMEOUT_SECONDS": str(int(START_TIMEOUT)),
        }
        self.server = servers.start(*shell, *command, log=home / "dagster-dev.log", env=variables)
        try:
            wait_until(self._answers, START_TIMEOUT, "a webserver that answers")
        except BaseException:
            self.stop()
            raise

    def _answers(self) -> bool:
        assert self.server.poll() is None, (self.home / "dagster-dev.log").read_text()[-3000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self._url}/server_info", timeout=5) as response:
            return bool(response.status == 200)
        return False

    # -- its GraphQL ---------------------------------------------------------------------------

    def query(self, text: str, **variables: Any) -> dict[str, Any]:
        """The data of an answer."""
        body = json.dumps({"query": text, "variables": variables}).encode()
        request = urllib.request.Request(f"{self._url}/graphql", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
        assert "errors" not in answer, answer
        return dict(answer["data"])

    def _selector(self, **names: str) -> dict[str, str]:
        return {"repositoryLocationName": self.definitions.name, "repositoryName": "__repository__", **names}

    def launch(self, job: str, tags: Mapping[str, str]) -> str:
        """Starts a run; its id."""
        metadata = {"tags": [{"key": key, "value": value} for key, value in tags.items()]}
        params = {
            "selector": self._selector(pipelineName=job),
            "mode": "default",
            "runConfigData": {},
            "executionMetadata": metadata,
        }
        launched = self.query(_LAUNCH, params=params)["launchRun"]
        assert launched["__typename"] == "LaunchRunSuccess", launched
        return str(launched["run"]["runId"])

    def terminate(self, run_id: str) -> None:
        """What a user does who terminates a run."""
        terminated = self.query(_TERMINATE, id=run_id)["terminateRun"]
        assert terminated["__typename"] == "TerminateRunSuccess", terminated

    def runs_of(self, job: str) -> list[str]:
        """Ids of a job's runs."""
        found = self.query(_RUNS, filter={"pipelineName": job})["runsOrError"]["results"]
        return [str(run["runId"]) for run in found]

    def status(self, run_id: str) -> str:
        """The status of a run."""
        return str(self.query(_STATUS, id=run_id)["runOrError"]["status"])

    def finish(self, run_id: str) -> str:
        """The status in which a run ends."""
        wait_until(lambda: self.status(run_id) in FINAL, RUN_TIMEOUT, f"the end of run {run_id}")
        return self.status(run_id)

    # -- its end -------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ends everything."""
        try:
            servers.stop([self.server])
            for pid in processes_with(self.marker):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        finally:
            if self.postgres:
                self.postgres.stop()
