"""Ctrl-C in `dag.test()` ends the process and its training: no further try begins in it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT, processes_with, until

PROGRAM = """
import os, sys
from datetime import datetime, timedelta
from airflow.dag_processing.bundles.manager import DagBundlesManager
from airflow.sdk import DAG
from airflow_rankzero import TorchDistributorOperator
from tests.airflow import versions

def train():
    import threading
    print("trains", flush=True)
    threading.Event().wait()

with DAG("interrupted", schedule=None, start_date=datetime(2026, 1, 1)) as dag:
    TorchDistributorOperator(
        task_id="train", train=train, num_processes=1, conn_id="here", store=sys.argv[1], retries=2,
        retry_delay=timedelta(0), env={"MARK": os.environ["MARK"]},
    )
DagBundlesManager().sync_bundles_to_db()
versions.write(dag)
dag.test()
"""


def test_ctrl_c_ends_the_process_although_the_task_has_retries(airflow_home: Path, tmp_path: Path) -> None:
    marker = f"interrupted-{tmp_path.name}-{os.getpid()}"
    env = {**os.environ, "MARK": marker, "PYTHONPATH": str(ROOT)}
    log, program = tmp_path / "log", tmp_path / "program.py"
    program.write_text(PROGRAM)
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [sys.executable, str(program), str(tmp_path / "store")],
            env=env,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        until(lambda: "] trains" in log.read_text() or process.poll(), 120, "the training")
        # To all of the foreground group, as a terminal does.
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(120) == -signal.SIGINT, log.read_text()
        until(lambda: not processes_with(marker), 60, "the end of the ranks")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert log.read_text().count("] trains") == 1
    assert "ends with this process" in log.read_text()
    assert "continues without a follower" not in log.read_text()
