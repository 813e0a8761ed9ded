"""An Airflow task on Spark, beside the same function in a PythonOperator around TorchDistributor.

Run: ``python benchmarks/airflow_task.py [runs]``. On embedded Spark, and on a Spark Connect server that runs
throughout. Each task runs in a fresh process, through Airflow's task runner and its database; the time is from just
before ``execute`` to the callback of its success, which follows the XCom. Before that ``dag.test`` starts an API server
inside of the process; a real worker has one elsewhere.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import Report

TRIES = 3
"""TorchDistributor fails now and then, without a reason that it would tell; a failure of ours ends the measurement."""

RUNS = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 5
RANKS = 2
ROOT = str(Path(__file__).parents[1])
SERVER = "BENCHMARK_SERVER"
"""Variable with the URL of the Spark Connect server; unset on embedded Spark."""


def train(lr: float) -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    x = torch.full((1,), lr)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return float(x.item())


def wrapped() -> float:
    """What people write today."""
    from pyspark.ml.torch.distributor import TorchDistributor
    from pyspark.sql import SparkSession

    url, builder = os.environ.get(SERVER), SparkSession.builder
    spark = (builder.remote(url) if url else builder.master(f"local[{RANKS}]")).getOrCreate()
    try:
        return float(TorchDistributor(num_processes=RANKS, local_mode=False, use_gpu=False).run(train, 0.5))
    finally:
        spark.stop()


def run_task(which: str) -> None:
    from airflow.dag_processing.bundles.manager import DagBundlesManager
    from airflow.models.serialized_dag import SerializedDagModel
    from airflow.providers.standard.operators.python import PythonOperator
    from airflow.sdk import DAG
    from airflow.serialization.definitions.dag import SerializedDAG
    from airflow.serialization.serialized_objects import LazyDeserializedDAG
    from airflow.utils.session import create_session

    from airflow_rankzero import TorchDistributorOperator

    stamps: list[float] = []

    def stamp(*_: object) -> None:
        stamps.append(time.perf_counter())

    with DAG("benchmark", schedule=None) as dag:
        common = {"task_id": "train", "pre_execute": stamp, "on_success_callback": stamp}
        if which == "rankzero":
            place = {"master": os.environ.get(SERVER)}
            TorchDistributorOperator(train=train, op_args=[0.5], num_processes=RANKS, **place, **common)
        else:
            PythonOperator(python_callable=wrapped, **common)
    DagBundlesManager().sync_bundles_to_db()
    lazy = LazyDeserializedDAG.from_dag(dag)
    with create_session() as session:
        SerializedDAG.bulk_write_to_db("dags-folder", None, [lazy], session=session)
        SerializedDagModel.write_dag(lazy, bundle_name="dags-folder", session=session)
    dag_run = dag.test()
    task = dag_run.get_task_instance("train")
    assert task.state == "success", task.state
    assert task.xcom_pull(task_ids="train") is not None
    before, after = stamps
    print("took", after - before, flush=True)
    os._exit(0)


def seconds_of(which: str, environment: dict[str, str]) -> float:
    """Of one task, in a process of its own."""
    command = [sys.executable, __file__, "task", which]
    for _ in range(TRIES):
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if not done.returncode:
            return float(done.stdout.split("took")[-1].split()[0])
        print(f"a task of {which} failed: {done.stderr[-3000:]}")
        if which == "rankzero":
            break
    sys.exit(f"no task of {which} has succeeded")


def measure(environment: dict[str, str]) -> dict[str, list[float]]:
    """Seconds of both kinds of task, in turn."""
    seconds: dict[str, list[float]] = {"rankzero": [], "peer": []}
    for _ in range(RUNS):
        for which, values in seconds.items():
            values.append(seconds_of(which, environment))
    return seconds


def main() -> None:
    sys.path.insert(0, ROOT)
    os.environ.setdefault("RANKZERO_TEST_SUITE", "benchmark")
    from tests.contract.engines.connect_server import connect_server

    report = Report("airflow_task", "An Airflow task on Spark, 2 ranks, one all-reduce")
    with tempfile.TemporaryDirectory(prefix="rankzero-bench-") as home:
        environment = {
            **os.environ,
            "AIRFLOW_HOME": home,
            "AIRFLOW__CORE__DAGS_FOLDER": os.path.join(home, "dags"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
            "RANKZERO_STORE": os.path.join(home, "store"),
            "PYSPARK_PYTHON": sys.executable,
        }
        migrate = [sys.executable, "-m", "airflow", "db", "migrate"]
        subprocess.run(migrate, check=True, capture_output=True, env=environment)
        embedded = measure(environment)
        with connect_server(Path(home)) as server:
            environment[SERVER] = server.url
            first = seconds_of("rankzero", environment)
            connect = measure(environment)
    ours = report.add("TorchDistributorOperator", embedded["rankzero"])
    theirs = report.add("PythonOperator around TorchDistributor", embedded["peer"])
    on_connect = report.add("TorchDistributorOperator, Spark Connect", connect["rankzero"])
    report.add("TorchDistributorOperator, the first on a Spark Connect server", [first])
    peer_on_connect = report.add("PythonOperator around TorchDistributor, Spark Connect", connect["peer"])
    report.hold("ours / theirs", ours / theirs, 0.5)
    report.hold("ours / theirs, Spark Connect", on_connect / peer_on_connect, 0.1)
    report.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["task"]:
        run_task(sys.argv[2])
    else:
        main()
