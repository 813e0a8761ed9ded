"""MLflow: runs on a real server, and a model in its registry: `make test-frameworks`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import free_port, until
from tests.docs.pages import blocks
from tests.doors.frameworks.conftest import TRACKING

from rankzero import InvalidJobError, Launcher, RunHandle, WorkerFailedError
from rankzero.tracking import MLflow

mlflow = pytest.importorskip("mlflow", reason="make test-frameworks")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """To import mlflow takes seconds, and a busy machine has no ten of them."""
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "6")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home, port = tmp_path_factory.mktemp("mlflow"), free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{home}/db", "--artifacts-destination", str(home / "artifacts")]
    environment = {**os.environ, "PYTHONPATH": str(TRACKING)}
    url = f"http://127.0.0.1:{port}"
    with open(home / "log", "wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=home, stdout=log, stderr=log, start_new_session=True)
    try:
        until(lambda: process.poll() is not None or answers(url), START_TIMEOUT, "the server answers", pause=0.2)
        assert process.poll() is None, (home / "log").read_text()[-2000:]
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


START_TIMEOUT = 280.0  # Seconds for the server, which imports much


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.fixture
def client(server: str) -> Any:
    return mlflow.MlflowClient(server)


def runs(client: Any, experiment: str) -> list[Any]:
    return client.search_runs([client.get_experiment_by_name(experiment).experiment_id])


def test_a_training_is_one_run_whatever_happens_to_it(server: str, client: Any, tmp_path: Path) -> None:
    """A rank is killed, the run fails, and it is submitted again."""

    def train(lr: float, steps: int, marker: str, api_key: str = "geheim") -> dict[str, Any]:
        import os
        import signal

        import torch

        import rankzero.train as rt

        context = rt.get_context()
        for step in range(steps):
            rt.report({"step": step, "loss @ 1": lr / (step + 1), "odd": float("nan")})
        rt.barrier()
        if context.attempt == 0 and context.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        rt.barrier()
        if not os.path.exists(marker):
            open(marker, "w").close()
            raise ValueError("no luck")
        return {"weight": torch.full((3,), lr)}

    tracker = MLflow(server, experiment="one run", ranks=None, tags={"team": "vision"})
    launcher = Launcher(
        2,
        store=tmp_path,
        run_id="one",
        max_restarts=1,
        trackers=[tracker],
        labels={"dag": "digits"},
        code_version="abc",
    )
    arguments = 0.5, 400, str(tmp_path / "marker")
    with pytest.raises(WorkerFailedError):
        launcher.run(train, *arguments)
    (failed,) = runs(client, "one run")
    assert failed.info.status == "FAILED"
    assert "no luck" in failed.data.tags["rankzero.error"]
    launcher.run(train, *arguments)
    (run,) = runs(client, "one run")
    assert run.info.run_id == failed.info.run_id
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "one"
    shown = {"lr": "0.5", "steps": "400", "marker": arguments[2], "api_key": "***"}
    assert run.data.params == shown
    tags = {"team": "vision", "dag": "digits", "rankzero.run_id": "one", "rankzero.code_version": "abc"}
    assert tags.items() <= run.data.tags.items()
    assert run.data.tags["rankzero.world_size"] == "2"
    assert int(run.data.tags["rankzero.attempt"]) >= 2
    history = client.get_metric_history(run.info.run_id, "loss _ 1")
    # Three or more attempts, and the events of the first submission twice: each point is there once.
    points = {(each.step, each.timestamp, each.value) for each in history}
    assert len(history) == len(points)
    assert {each.step for each in history} == set(range(400))
    assert {each.value for each in history if each.step == 1} == {0.25}
    assert "loss _ 1/rank-1" in run.data.metrics


def test_what_mlflow_does_not_take_costs_nothing_else(server: str, client: Any, tmp_path: Path) -> None:
    """A name that is too long, a step that no column holds, and a default that has changed between two tries."""
    marker = str(tmp_path / "marker")

    def train(marker: str, lr: float = 0.5) -> None:
        import os

        import rankzero.train as rt

        rt.report({"step": 10**20, "loss": 1.0, "long" * 100: 2.0})
        rt.report({"step": 7, "loss": 3.0})
        if not os.path.exists(marker):
            open(marker, "w").close()
            raise ValueError("no luck")

    tracker = MLflow(server, experiment="refused")
    launcher = Launcher(1, store=tmp_path, run_id="one", trackers=[tracker], code_version="abc")
    with pytest.raises(WorkerFailedError):
        launcher.run(train, marker)
    (run,) = runs(client, "refused")
    assert run.info.status == "FAILED"
    assert [each.value for each in client.get_metric_history(run.info.run_id, "loss") if each.step == 7] == [3.0]
    train.__defaults__ = (0.7,)
    launcher.run(train, marker)
    (run,) = runs(client, "refused")
    assert run.info.status == "FINISHED"
    assert run.data.params["lr"] == "0.5"


def test_a_report_that_is_sent_again_keeps_its_number(server: str, client: Any, tmp_path: Path) -> None:
    Launcher(1, store=tmp_path, run_id="one").run(float, 0.5)
    run, tracker = RunHandle.attach(tmp_path / "one"), MLflow(server, experiment="again")
    tracker.begin(run)
    events = [{"type": "metric", "rank": 0, "time": 1.0, "metrics": {"loss": value}} for value in (0.5, 0.25)]
    there, tracker._client = tracker._client, mlflow.MlflowClient("http://127.0.0.1:1")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        with pytest.raises(mlflow.exceptions.MlflowException):
            tracker.add(run, events)
    tracker._client = there
    tracker.add(run, events)
    (found,) = runs(client, "again")
    history = client.get_metric_history(found.info.run_id, "loss")
    assert [(each.step, each.value) for each in history] == [(1, 0.5), (2, 0.25)]


def test_another_training_and_one_on_a_new_disk_is_another_run(server: str, client: Any, tmp_path: Path) -> None:
    """The run id is the same, and the path on a new disk, too: in a container that has started again, for example."""

    def train(lr: float) -> float:
        import rankzero.train as rt

        rt.report({"step": 0, "loss": lr})
        return lr

    launcher = Launcher(1, store=tmp_path / "runs", run_id="one", trackers=[MLflow(server, experiment="new disk")])
    for lr in (0.1, 0.5):
        launcher.run(train, lr)
    (tmp_path / "runs").rename(tmp_path / "runs before")
    launcher.run(train, 0.9)
    found = {run.data.params["lr"]: run for run in runs(client, "new disk")}
    assert {
        lr: [each.value for each in client.get_metric_history(run.info.run_id, "loss")] for lr, run in found.items()
    } == {
        "0.1": [0.1],
        "0.5": [0.5],
        "0.9": [0.9],
    }


def test_names_that_mlflow_does_not_tell_apart_stay_different(server: str, client: Any, tmp_path: Path) -> None:
    def train(**options: float) -> None:
        import rankzero.train as rt

        rt.report({"step": 0, "mae<1": 1.0, "mae>1": 2.0, "mae_1": 3.0})

    tracker = MLflow(server, experiment="names", tags={"a<b": "1", "a>b": "2"})
    Launcher(1, store=tmp_path, trackers=[tracker]).run(train, **{"mae<1": 4.0, "mae>1": 5.0})
    (run,) = runs(client, "names")
    assert run.data.metrics["mae_1"] == 1.0
    assert sorted(run.data.metrics.values()) == [1.0, 2.0, 3.0]
    assert sorted(run.data.params.values()) == ["4.0", "5.0"]
    assert {"1", "2"} <= set(run.data.tags.values())


def test_a_server_that_is_away_costs_the_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.05")
    tracker = MLflow(f"http://127.0.0.1:{free_port()}")
    assert Launcher(1, store=tmp_path, trackers=[tracker]).run(float, "0.5") == 0.5


def test_the_documentations_pipeline_registers_a_model(tmp_path: Path) -> None:
    """The step behind the training logs a model of MLflow into a file store, which any reader of MLflow opens."""
    (block,) = [block for block in blocks("docs/reports.md") if block.mark == "mlflow"]
    program = tmp_path / "pipeline.py"
    program.write_text(
        block.text + "\nprint(mlflow.pyfunc.load_model('models:/digits@champion').predict(rows).shape)\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(TRACKING),
        "MLFLOW_TRACKING_URI": f"{tmp_path}/mlruns",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "RANKZERO_STORE": str(tmp_path / "runs"),
    }
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "(8, 2)"


def test_without_mlflow_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mlflow")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(
        InvalidJobError, match="trackers has MLflow, which needs mlflow here: pip install mlflow-skinny"
    ):
        MLflow().check()
