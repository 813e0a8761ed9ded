"""The blocks of the documentation that are for Dagster: definitions that load, and what loading them imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from tests.conftest import ROOT
from tests.docs import blocks
from tests.docs.given import training

import dagster_rankzero
import rankzero.train as rt
from rankzero import CheckpointConfig, Launcher, ResultRef
from rankzero.compat.ray_train import TorchTrainer

pytest_plugins = ["rankzero.testing.fixtures"]


class TrainConfig(dg.Config):
    """Of the reader's."""

    epochs: int = 1


@dg.asset
def scans() -> dict[str, int]:
    """Of the reader's."""
    return {}


PIPELINE = """
import dagster as dg
from dagster_rankzero import torch_asset
from rankzero import ResultRef


@torch_asset
def model() -> dict: ...


@dg.asset
def champion(model: ResultRef) -> dict | None:
    return model.load() if model.load()["accuracy"] > 0.9 else None
"""


def look_at(shown: str) -> None:
    """The YAML of a component has only keys that it takes."""
    attributes = yaml.safe_load(shown)["attributes"]
    fields = dagster_rankzero.TorchTrainingComponent.model_fields
    assert set(attributes) <= set(fields)


@pytest.mark.parametrize("page", blocks.pages_of("dagster"))
def test_the_blocks_of_a_page_are_definitions(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    import torch

    monkeypatch.chdir(tmp_path)
    Path("pipeline.py").write_text(PIPELINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SPARK_MASTER", "local[2]")
    names = {name: getattr(dagster_rankzero, name) for name in dagster_rankzero.__all__}
    given: dict[str, Any] = {
        **names,
        "dg": dg,
        "rt": rt,
        "torch": torch,
        "CheckpointConfig": CheckpointConfig,
        "Launcher": Launcher,
        "ResultRef": ResultRef,
        "TrainConfig": TrainConfig,
        "days": dg.DailyPartitionsDefinition("2026-01-01"),
        "scans": scans,
        "training": training,
        "trainer": TorchTrainer(training),
        "train": training,
        "look_at": look_at,
    }
    blocks.run_page(page, "dagster", given, request)


@pytest.mark.parametrize("name", blocks.modules_with_examples(ROOT / "dagster_integration/dagster_rankzero"))
def test_the_examples_of_docstrings_are_true(name: str) -> None:
    blocks.run_examples(name)


def test_the_package_imports_no_heavy_library_and_dagster_knows_it() -> None:
    program = (
        "import warnings; warnings.simplefilter('error')\n"
        # As the dg command does: every name is looked at.
        "import sys, dagster, dagster_rankzero\n"
        "from dagster_shared.libraries import DagsterLibraryRegistry\n"
        "assert DagsterLibraryRegistry.get()['dagster-rankzero'] == dagster_rankzero.__version__\n"
        "before = set(sys.modules)\n"
        "[getattr(dagster_rankzero, name) for name in dir(dagster_rankzero)]\n"
        "heavy = ('torch', 'pyspark', 'numpy', 'pandas', 'airflow', 'matplotlib', 'upath', 's3fs')\n"
        "print([name for name in heavy if name in sys.modules and name not in before])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
