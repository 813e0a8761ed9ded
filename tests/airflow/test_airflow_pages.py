"""The blocks of the documentation that are for Airflow: they stand in a DAG, and make its tasks."""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.docs import blocks
from tests.docs.given import SCRIPT, training


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
        "my_training": SimpleNamespace(train=training),
        "prepare": prepare().operator,
        "evaluate": evaluate,
        "trainer": TorchTrainer(training),
        "look_at": look_at,
    }


def look_at(shown: Mapping[str, str] | str) -> None:
    """A connection in the environment is one that our hook takes; an option in a file is one that there is."""
    from airflow_rankzero import config
    from airflow_rankzero.hooks.rankzero import RankZeroHook

    if isinstance(shown, str):
        parser = configparser.ConfigParser(interpolation=None)
        parser.read_string(shown)
        assert set(parser[config.SECTION]) <= set(config.OPTIONS)
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
