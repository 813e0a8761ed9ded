"""The fixtures for users' own tests, used as users do: in a test session of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = 'pytest_plugins = ["rankzero.testing.fixtures"]'

LAUNCHER = """
import os
import pytest
from rankzero import Launcher, SparkEngine, WorkerFailedError
from rankzero.testing import run_inline

def train(lr):
    return {"lr": lr, "pid": os.getpid()}

def test_local(local_trainings):
    launcher = Launcher(1, engine=SparkEngine(master="spark://no.such.host:7077"), run_id="one")
    value = launcher.run(train, lr=0.5)
    assert value["lr"] == 0.5
    assert value["pid"] != os.getpid()
    assert (local_trainings / "one" / "submissions" / "0.json").exists()

def test_fake(fake_trainings):
    fake_trainings.result = lambda lr: {"accuracy": 1 - lr}
    assert Launcher(2, engine=SparkEngine(master="yarn")).run(train, lr=0.25) == {"accuracy": 0.75}
    assert fake_trainings.calls == [(train, (), {"lr": 0.25})]

def test_fake_failure(fake_trainings):
    fake_trainings.error = "no GPU today"
    with pytest.raises(WorkerFailedError, match="no GPU today"):
        Launcher(1).run(train, lr=0.25)
"""

DAGSTER = """
import dagster as dg
from dagster_rankzero import RankZeroIOManager, TorchDistributorResource, torch_asset

@torch_asset
def model(lr: float) -> dict:
    raise AssertionError("it was not to train")

@dg.asset
def champion(model: dict) -> float:
    return model["accuracy"]

@dg.asset
def lr() -> float:
    return 0.25

def test_the_gate(fake_trainings, tmp_path):
    fake_trainings.result = {"accuracy": 0.9}
    resources = {
        "torch_distributor": TorchDistributorResource(num_processes=2, master="spark://no.such.host:7077"),
        "io_manager": RankZeroIOManager(base_path=str(tmp_path / "values")),
    }
    result = dg.materialize([lr, model, champion], resources=resources)
    assert result.output_for_node("champion") == 0.9
    # What a step before has stored goes to the ranks as its handle.
    assert fake_trainings.calls[0][2]["lr"].load() == 0.25
"""


@pytest.mark.parametrize(
    ("tests", "passed"),
    [
        pytest.param(LAUNCHER, 3, id="launcher"),
        # By default: the pipeline of `docs/python.md`, in `tests/docs/test_blocks.py`.
        pytest.param(DAGSTER, 1, id="dagster", marks=pytest.mark.soak),
    ],
)
def test_a_session_of_the_users_passes(tmp_path: Path, tests: str, passed: int) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_users.py").write_text(tests)
    # With this environment, and so with what the suite has loaded: pytester has another HOME and PYTHONPATH.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert f"\n{passed} passed in " in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
