"""Components of Airflow as forks of one process: each of them would take three seconds to import what they share.

python -m tests.airflow.components FOLDER COMPONENT...

FOLDER/COMPONENT.pid has the id of each one's process and group, and FOLDER/COMPONENT.log what it prints.
"""

import contextlib
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


def run(folder: Path, name: str) -> None:
    """Becomes a component, as ``python -m airflow`` does, in a group of its own."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
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
    """Ends with the last component; SIGTERM ends all of them."""
    folder, *names = sys.argv[1:]
    load()
    children: list[int] = []

    def end(*_: object) -> None:
        for child in children:
            # One that was killed may have been collected.
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    for name in names:
        children.append(os.fork())
        if not children[-1]:
            return run(Path(folder), name)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
