"""The fixtures for users' own tests, used as users do: in a test session of its own."""

import os
import subprocess
import sys
from pathlib import Path

CONFTEST = 'pytest_plugins = ["rankzero.testing.fixtures"]'

LAUNCHER = """
import os
from unittest.mock import Mock
import pytest
from rankzero import Launcher, SparkEngine, WorkerFailedError
from rankzero.pipeline import open_run
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
        Launcher(1).submit(train, lr=0.25).result(60)

def test_fake_step(fake_trainings):
    fake_trainings.result = 7
    step = Mock(generation="one", retrier=None, is_followed_by_another=True)
    with open_run(Launcher(1, run_id="one"), train, (), {"lr": 0.25}, step) as handle:
        assert handle.result(60) == 7
    assert fake_trainings.calls == [(train, (), {"lr": 0.25})]
"""


def test_a_session_of_the_users_passes(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_users.py").write_text(LAUNCHER)
    # With this environment, and so with what the suite has loaded: pytester has another HOME and PYTHONPATH.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert "\n4 passed in " in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
