"""Ranks in an environment of the user's own, which Spark's archives bring: the steps of docs/clusters.md, done."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.contract.engines.bare_trainings import from_the_environment
from tests.contract.engines.conftest import Standalone
from tests.contract.engines.pythons import TORCH, python_with

from rankzero import Launcher, SparkEngine

ONLY_THERE = "rankzero_test_only_there"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive of a Python with torch and a module of ours; the environment itself is gone.

    torch is a link in it, for the sake of its gigabyte.
    """
    home = tmp_path_factory.mktemp("environment") / "env"
    python_with(home, TORCH)
    (place,) = home.glob("lib/python*/site-packages")
    (place / f"{ONLY_THERE}.py").write_text("VALUE = 42\n")
    packed = home.with_name("env.tar.gz")
    subprocess.run([sys.executable, "-m", "venv_pack", "-p", str(home), "-o", str(packed)], check=True)
    shutil.rmtree(home)
    return packed


def conf(environment: Path | str) -> dict[str, str]:
    return {
        "spark.archives": f"{environment}#environment",
        "spark.pyspark.python": "./environment/bin/python",
        # What the suite's own search path has would hide that something is missing.
        "spark.executorEnv.PYTHONPATH": "",
        "spark.executor.memory": "512m",
        "spark.cores.max": "2",
        "spark.ui.enabled": "false",
    }


def check(ranks: list[dict[str, Any]]) -> None:
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["python"].endswith("/environment/bin/python")
        assert rank["value"] == 42
        assert rank["sum"] == 2.0
        assert "rankzero.zip" in rank["rankzero"]
        assert "/work/" in rank["directory"]


@pytest.mark.soak
def test_an_archive_brings_the_python_of_executors(
    launcher: Launcher, cluster: Standalone, environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(environment.parent)
    engine = SparkEngine(cluster.url, conf=conf(environment.name))
    check(launcher.options(engine=engine).run(from_the_environment, ONLY_THERE))
