"""The blocks of the documentation that are for Airflow: they stand in a DAG, and make its tasks."""

from __future__ import annotations

import configparser
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.conftest import ROOT
from tests.docs import blocks
from tests.docs.given import SCRIPT, training
from tests.docs.pages import blocks as blocks_of


def given() -> dict[str, Any]:
    """What the pages leave to their readers."""
    from airflow.sdk import task

    from rankzero import Launcher, ResultRef
    from rankzero.compat.ray_train import TorchTrainer

    Path("train.py").write_text(SCRIPT)

    @task
    def prepare() -> int:
        return 1

    @task
    def evaluate(model: object) -> None: ...

    return {
        "Launcher": Launcher,
        "ResultRef": ResultRef,
        "task": task,
        "my_training": SimpleNamespace(train=lambda data, lr: training(lr)),
        "prepare": prepare().operator,
        "evaluate": evaluate,
        "trainer": TorchTrainer(training),
        "look_at": look_at,
    }


def look_at(shown: Mapping[str, str] | str) -> None:
    """A connection in the environment is one that our hook takes; an option in a file is one that there is."""
    from airflow_rankzero import provider_info
    from airflow_rankzero.hooks import RankZeroHook

    if isinstance(shown, str):
        parser = configparser.ConfigParser(interpolation=None)
        parser.read_string(shown)
        assert set(parser[provider_info.SECTION]) <= set(provider_info.OPTIONS)
        return
    for name, value in shown.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, value)
            assert RankZeroHook(name.removeprefix("AIRFLOW_CONN_").lower()).get_conn()


@pytest.mark.parametrize("page", blocks.pages_of("airflow"))
def test_the_blocks_of_a_page_make_a_dag(
    page: str, dag: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks.run_page(page, "airflow", given(), request)


def test_the_first_dag_trains_and_its_next_task_opens_the_result(
    run_dag: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.dag_processing.dagbag import BundleDagBag

    from rankzero import ResultRef, RunHandle

    (block,) = [block for block in blocks_of("docs/start-airflow.md") if block.language == "python"]
    file = tmp_path / "dags" / "first.py"
    file.parent.mkdir()
    # Each epoch stores a checkpoint: a tenth of them is enough.
    file.write_text(block.text.replace("time.sleep(1)", "pass").replace("epochs=60", "epochs=6"))
    monkeypatch.setenv("RANKZERO_STORE", str(tmp_path / "runs"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    bag = BundleDagBag(dag_folder=file, bundle_path=file.parent, bundle_name="dags-folder")
    assert bag.import_errors == {}
    outcome = run_dag(bag.dags["first"])
    assert outcome.state == "success", outcome.errors
    assert isinstance(outcome.xcom("train"), ResultRef)
    assert isinstance(outcome.xcom("evaluate"), float)
    (directory,) = (tmp_path / "runs").iterdir()
    rows = [row["epoch"] for row in RunHandle.attach(directory).metrics() if row["rank"] == 0]
    assert rows == list(range(6))


@pytest.mark.parametrize("name", blocks.modules_with_examples(ROOT / "airflow_provider/airflow_rankzero"))
def test_the_examples_of_docstrings_are_true(name: str) -> None:
    blocks.run_examples(name)
