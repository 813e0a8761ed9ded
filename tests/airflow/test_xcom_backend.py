"""Results under Airflow's object-storage XCom backend, which is chosen when a process starts."""

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT


def test_references_pass_through_the_object_storage_backend(airflow_home: Path, tmp_path: Path) -> None:
    storage = tmp_path / "xcoms"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "AIRFLOW_HOME": str(airflow_home),
        "AIRFLOW__CORE__XCOM_BACKEND": "airflow.providers.common.io.xcom.backend.XComObjectStorageBackend",
        "AIRFLOW__COMMON_IO__XCOM_OBJECTSTORAGE_PATH": f"file://{storage}",
        "AIRFLOW__COMMON_IO__XCOM_OBJECTSTORAGE_THRESHOLD": "0",
    }
    program = [sys.executable, "-m", "tests.airflow.object_storage_dag", str(tmp_path / "store")]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "ended: success" in done.stdout, done.stdout[-4000:]
    # The listener for the end of the DAG run finds the training's directory there, too.
    assert "left to its lease" not in done.stdout + done.stderr
    # The references themselves lay there, not only in the database.
    assert any("ResultRef" in file.read_text() for file in storage.rglob("*") if file.is_file())
