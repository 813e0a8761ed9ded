"""Results under Airflow's object-storage XCom backend, which Airflow chooses when a process imports it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.airflow.conftest import Watched


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Has tasks keep every XCom in this folder, as the settings of a deployment would."""
    from airflow.providers.common.io.xcom import backend
    from airflow.sdk.execution_time import task_runner, xcom

    monkeypatch.setenv("AIRFLOW__CORE__XCOM_BACKEND", f"{backend.__name__}.XComObjectStorageBackend")
    monkeypatch.setenv("AIRFLOW__COMMON_IO__XCOM_OBJECTSTORAGE_PATH", f"file://{tmp_path}/xcoms")
    monkeypatch.setenv("AIRFLOW__COMMON_IO__XCOM_OBJECTSTORAGE_THRESHOLD", "0")
    kept = [backend._get_base_path, backend._get_threshold, backend._get_compression]
    for module in (task_runner, xcom):
        monkeypatch.setattr(module, "XCom", xcom.resolve_xcom_backend())
    assert xcom.XCom is backend.XComObjectStorageBackend
    for setting in kept:
        setting.cache_clear()
    yield tmp_path / "xcoms"
    for setting in kept:
        setting.cache_clear()


def test_references_pass_through_the_object_storage_backend(
    storage: Path, dag: Any, run_dag: Callable[..., Any], tmp_path: Path
) -> None:
    """Values, references, and a reference as an argument of the next training."""
    from airflow.sdk import task

    from airflow_rankzero import torch_distributor

    @torch_distributor(num_processes=1, conn_id="here", store=str(tmp_path / "store"))
    def train() -> dict:
        import torch

        return {"weights": torch.arange(4.0)}

    @torch_distributor(num_processes=1, conn_id="here", store=str(tmp_path / "store"))
    def evaluate(model: dict) -> float:
        return float(model["weights"].sum())

    @task
    def check(model: Any, total: float) -> None:
        assert total == 6.0
        assert model.load()["weights"].tolist() == [0.0, 1.0, 2.0, 3.0]

    trained = train()
    check(trained, evaluate(trained))
    outcome = run_dag(dag)
    assert outcome.state == "success", outcome.errors
    # The references themselves lay there, not only in the database.
    assert any("ResultRef" in file.read_text() for file in storage.rglob("*") if file.is_file())


def test_the_scheduler_finds_a_training_in_the_object_storage_backend(storage: Path, watched: Watched) -> None:
    watched.set_state("failed")
    watched.poll()
    assert watched.handle.wait(60)
