"""Executors whose Python has torch, numpy and nothing else: all of rankzero that ranks use travels with the job."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.engines.bare_trainings import what_is_there
from tests.contract.engines.pythons import TORCH, python_with
from tests.services import spark_session, start_own_jvm

from rankzero import Launcher, SparkEngine


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SparkEngine]:
    """A session of this process on two executors with torch, what torch itself needs, and numpy, by which torch sends
    objects between ranks."""
    # The environment of the JVM stays that of the suite.
    start_own_jvm()
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("PYSPARK_PYTHON", python_with(tmp_path / "venv", TORCH))
    with spark_session("local-cluster[2,1,1024]", **{"spark.executorEnv.PYTHONPATH": ""}) as session:
        yield SparkEngine(session=session)


def test_nothing_but_torch_is_installed_there(launcher: Launcher, bare: SparkEngine, tmp_path: Path) -> None:
    on_bare = launcher.options(engine=bare)
    found = on_bare.run(what_is_there)
    assert found["python"] == os.environ["PYSPARK_PYTHON"]
    # These two travel; what else is found would hide that something is needed.
    assert set(found["found"]) <= {"rankzero", "cloudpickle"}
    assert "rankzero.zip" in found["rankzero"]
    (tmp_path / "beside.py").write_text("VALUE = 42\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nimport beside\nimport rankzero.train as rt\nrt.set_result([beside.VALUE, *sys.argv[1:]])\n"
    )
    assert on_bare.run(script, "--lr", "0.1") == [42, "--lr", "0.1"]
