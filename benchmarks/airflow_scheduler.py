"""A training through a whole Airflow: scheduler, API server, worker, database; where the time goes, and the memory.

Run: ``python benchmarks/airflow_scheduler.py [runs]``. Uses the deployment of the tests, on PostgreSQL where it is
installed, with ranks on this machine.
"""

import statistics
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil
from measure import Report
from tests.airflow.deployment import Deployment, wait_until

RUNS = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 5
WAIT = 120.0
MB = 1 << 20


def seconds(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def one(airflow: Deployment, folder: Path) -> dict[str, float]:
    """Seconds of each part of a run of two ranks that have nothing to do."""
    (folder / "go").touch()
    began = time.time()
    run_id = airflow.trigger("durable", folder=str(folder), megabytes=0)
    wait_until(lambda: airflow.look("durable", run_id, "train")["state"] == "success", WAIT, "the task")
    task = airflow.look("durable", run_id, "train")
    run = airflow.run_of("durable", run_id)
    status = run.status()
    started, ended = seconds(task["start_date"]), seconds(task["end_date"])
    assert status.started
    assert status.ended
    return {
        "from the trigger to the task's start (scheduler)": started - began,
        "from there to the run's submission (Airflow's task process)": run.created - started,
        "from there to all ranks (driver, agents, torch)": status.started - run.created,
        "from there to the end of the run": status.ended - status.started,
        "from there to the task's end (XCom, API server)": ended - status.ended,
        "all": ended - began,
    }


def memory(airflow: Deployment, dag_id: str, folder: Path, state: str) -> float:
    """MB of its own that the task's process has while its ranks train."""
    run_id = airflow.trigger(dag_id, folder=str(folder), megabytes=0)
    run = airflow.run_of(dag_id, run_id)
    wait_until(lambda: run.status().state == "running", WAIT, "the training")
    wait_until(lambda: airflow.look(dag_id, run_id, "train")["state"] == state, WAIT, state)
    process = airflow.task_process(dag_id, run_id, "train")
    try:
        used = psutil.Process(process).memory_full_info().uss / MB
    except psutil.NoSuchProcess:
        used = 0.0
    (folder / "go").touch()
    airflow.finish(dag_id, run_id)
    return used


def main() -> None:
    report = Report("airflow_scheduler", "A training of two ranks through a whole Airflow")
    with tempfile.TemporaryDirectory(prefix="rankzero-bench-") as directory:
        home = Path(directory)
        (home / "airflow").mkdir()
        airflow = Deployment(home / "airflow")
        try:
            airflow.wait_until_ready(["durable", "deferred"])
            folders = [home / f"folder-{number}" for number in range(RUNS + 3)]
            for folder in folders:
                folder.mkdir()
            one(airflow, folders[0])
            parts = [one(airflow, folder) for folder in folders[1 : RUNS + 1]]
            for name in parts[0]:
                report.add(name, [part[name] for part in parts])
            waiting = [memory(airflow, "durable", folders[-2], "running")]
            deferred = [memory(airflow, "deferred", folders[-1], "deferred")]
            report.add("memory of its own of the task's process while it waits", waiting, "MB")
            report.add("the same of a deferred task", deferred, "MB")
            report.hold("memory of a waiting task, MB", statistics.median(waiting), 150)
            report.hold("memory of a deferred task, MB", statistics.median(deferred), 0)
            parsed = airflow.call("GET", "/api/v2/dags/durable/details").get("last_parse_duration")
            if parsed is not None:
                report.add("parsing the DAG file (six DAGs)", [parsed])
        finally:
            airflow.stop()
    report.finish()


if __name__ == "__main__":
    main()
