"""MLflow: runs, and a registry with a champion, on a real server: `make test-frameworks`."""

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
from tests.frameworks.conftest import TRACKING

from rankzero import InvalidJobError, Launcher, ResultError, ResultRef, RunHandle, WorkerFailedError
from rankzero.tracking import MLflow, load_model, register_model

mlflow = pytest.importorskip("mlflow", reason="make test-frameworks")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """To import mlflow takes seconds, and a busy machine has no ten of them."""
    monkeypatch.setattr("rankzero.bounds.TRACKERS_TIMEOUT", 60.0)


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


START_TIMEOUT = 280.0
"""Seconds for the server, which imports much."""


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


def test_another_training_under_the_same_run_id_is_another_run(server: str, client: Any, tmp_path: Path) -> None:
    launcher = Launcher(1, store=tmp_path, run_id="one", trackers=[MLflow(server, experiment="two runs")])
    for lr in ("0.5", "0.7"):
        launcher.run(float, lr)
    assert len(runs(client, "two runs")) == 2


def test_a_training_on_a_new_disk_is_another_run(server: str, client: Any, tmp_path: Path) -> None:
    """The path of the run directory is the same: in a container that has started again, or after a clean-up."""

    def train(lr: float) -> float:
        import rankzero.train as rt

        rt.report({"step": 0, "loss": lr})
        return lr

    refs = []
    for lr in (0.1, 0.9):
        launcher = Launcher(1, store=tmp_path / "runs", run_id="one", trackers=[MLflow(server, experiment="new disk")])
        with launcher.owned(train, (lr,), {}) as handle:
            refs.append(handle.result_ref())
        (tmp_path / "runs").rename(tmp_path / f"runs-{lr}")
    found = {run.data.params["lr"]: run for run in runs(client, "new disk")}
    assert {
        lr: [each.value for each in client.get_metric_history(run.info.run_id, "loss")] for lr, run in found.items()
    } == {
        "0.1": [0.1],
        "0.9": [0.9],
    }
    # A version belongs to the run of its training, not to one of the same path.
    (tmp_path / "runs-0.1").rename(tmp_path / "runs")
    register_model(refs[0], "on a disk", {"loss": 0.1}, metric="loss", mode="min", uri=server)
    version = client.get_model_version_by_alias("on a disk", "champion")
    assert version.run_id == found["0.1"].info.run_id


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
    monkeypatch.setattr("rankzero.bounds.TRACKERS_TIMEOUT", 0.5)
    tracker = MLflow(f"http://127.0.0.1:{free_port()}")
    assert Launcher(1, store=tmp_path, trackers=[tracker]).run(float, "0.5") == 0.5


def test_only_a_better_result_becomes_the_champion(server: str, client: Any, tmp_path: Path) -> None:
    import torch

    def make(value: float) -> Any:
        return {"weight": torch.full((3,), value)}

    launcher = Launcher(1, store=tmp_path, trackers=[MLflow(server, experiment="champions")])

    def trained(value: float) -> Any:
        with launcher.owned(make, (value,), {}) as handle:
            return handle.result_ref()

    def register(ref: Any, accuracy: float) -> Any:
        return register_model(ref, "digits", {"accuracy": accuracy}, metric="accuracy", uri=server)

    first, worse, better = trained(1.0), trained(2.0), trained(3.0)
    assert (made := register(first, 0.9)).is_champion
    assert made.beaten is None
    assert not (lost := register(worse, 0.8)).is_champion
    assert lost.beaten == 0.9
    assert not register(trained(4.0), float("nan")).is_champion
    assert load_model("digits", uri=server)["weight"].tolist() == [1.0] * 3
    won = register(better, 0.95)
    assert won.is_champion
    # A retry of the pipeline's step.
    assert register(better, 0.95) == type(won)("digits", won.version, True)
    assert len(client.search_model_versions("name = 'digits'")) == 4
    # The run directory is not needed any more.
    os.unlink(better.uri)
    assert load_model("digits", uri=server)["weight"].tolist() == [3.0] * 3
    # The version is of the run of its training.
    version = client.get_model_version_by_alias("digits", "champion")
    assert client.get_run(version.run_id).data.params == {"value": "3.0"}
    assert version.tags["metric.accuracy"] == "0.95"


def test_a_version_that_is_measured_again_has_its_new_metric(server: str, tmp_path: Path) -> None:
    refs = [ResultRef.save({"weight": number}, tmp_path) for number in range(3)]

    def register(number: int, accuracy: float) -> Any:
        return register_model(refs[number], "measured", {"accuracy": accuracy}, metric="accuracy", uri=server)

    assert register(0, 0.90).is_champion
    assert register(1, 0.95).is_champion
    again = register(0, 0.97)
    assert (again.version, again.is_champion, again.beaten) == ("1", True, 0.95)
    worse = register(2, 0.92)
    assert (worse.is_champion, worse.beaten) == (False, 0.97)


def test_the_documentations_pipeline(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    (block,) = [block for block in blocks("docs/tracking.md") if block.mark == "a server"]
    names: dict[str, Any] = {"ref": ResultRef.save({"weight": 7}, tmp_path)}
    exec(compile(block.text.replace("digits", "documented"), block.page, "exec", dont_inherit=True), names)
    assert names["weights"] == {"weight": 7}
    assert not names["promote"](ResultRef.save({"weight": 8}, tmp_path), 0.96)


def test_a_result_of_a_run_that_was_not_tracked(server: str, tmp_path: Path) -> None:
    ref = ResultRef.save({"weight": 1}, tmp_path / "results")
    assert register_model(ref, "alone", {"loss": 1.0}, metric="loss", mode="min", uri=server).is_champion
    assert load_model("alone", uri=server) == {"weight": 1}
    with pytest.raises(InvalidJobError, match="metric is 'f1', and metrics has loss"):
        register_model(ref, "alone", {"loss": 1.0}, metric="f1", uri=server)
    other = ResultRef.save({"weight": 2}, tmp_path / "results")
    os.unlink(other.uri)
    with pytest.raises(ResultError, match="does not exist"):
        register_model(other, "alone", {"loss": 0.5}, metric="loss", mode="min", uri=server)


def test_without_mlflow_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mlflow")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(
        InvalidJobError, match="trackers has MLflow, which needs mlflow here: pip install mlflow-skinny"
    ):
        MLflow().check()
