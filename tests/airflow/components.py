"""Components of Airflow as forks of one process: each of them would take three seconds to import what they share.

python -m tests.airflow.components FOLDER COMPONENT...

FOLDER/COMPONENT.pid has the id of each one's process and group, and FOLDER/COMPONENT.log what it prints.
"""

import ctypes
import gc
import importlib
import os
import runpy
import signal
import sys
from pathlib import Path

SHARED = [
    "airflow.cli.cli_parser",
    "airflow.api_fastapi.execution_api.routes",
    "airflow.cli.commands.api_server_command",
    "airflow.jobs.dag_processor_job_runner",
    "airflow.jobs.scheduler_job_runner",
    "airflow.jobs.triggerer_job_runner",
    "airflow.sdk.execution_time.task_runner",
    "airflow_rankzero",
]
"""Modules that two of them import."""

PR_SET_PDEATHSIG = 1
"""The option of prctl by which a process gets a signal when its parent dies."""


def load() -> None:
    """Imports what the components share, and prepares Airflow's models. It opens no connection."""
    # A collection for each 700 new objects makes a third of the time of imports; nothing of them becomes garbage.
    gc.set_threshold(50_000, 20, 20)
    for name in SHARED:
        importlib.import_module(name)
    from airflow import models
    from sqlalchemy.orm import configure_mappers

    models.import_all_models()
    configure_mappers()
    gc.freeze()


def run(folder: Path, name: str, parent: int) -> None:
    """Becomes a component, as ``python -m airflow`` does, in a group of its own. It gets SIGTERM if its parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        return
    os.setpgid(0, 0)
    with open(folder / f"{name}.log", "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    new = folder / f"{name}.new"
    new.write_text(str(os.getpid()))
    new.rename(folder / f"{name}.pid")
    sys.argv = ["airflow", name]
    runpy.run_module("airflow", run_name="__main__", alter_sys=True)


def main() -> None:
    """Ends with the last component; all of them end with this process."""
    folder, *names = sys.argv[1:]
    load()
    parent = os.getpid()
    for name in names:
        if not os.fork():
            return run(Path(folder), name, parent)
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in names]
    # Tests kill components.
    sys.exit(max(0, *codes))


if __name__ == "__main__":
    main()
