"""A training script, as one starts it with torchrun, on a Spark cluster that Airflow knows.

The cluster is the connection ``spark_cluster``, of type ``spark``. In the UI, or as a variable:

    AIRFLOW_CONN_SPARK_CLUSTER='{"conn_type": "spark", "host": "spark://head", "port": 7077}'

The script and the modules beside it travel with the run: the executors need Python and torch, nothing else. Its
arguments are templated. What it gives to ``rankzero.train.set_result`` is the task's value.
"""

from datetime import datetime
from pathlib import Path
from typing import Any

from airflow.sdk import Param, dag, task

from airflow_rankzero import TorchDistributorOperator

SCRIPT = Path(__file__).parents[1] / "train_digits.py"
NUM_PROCESSES = 2


@dag(
    schedule=None,
    start_date=datetime(2026, 1, 1),
    params={
        "learning_rate": Param(4e-3, type="number", exclusiveMinimum=0),
        "epochs": Param(25, type="integer", minimum=1),
    },
    tags=["rankzero"],
)
def script_on_cluster() -> None:
    """Runs the training script on the cluster."""

    @task
    def report(outcome: dict[str, Any]) -> str:
        return f"accuracy {outcome['accuracy']:.3f} on {outcome['world_size']} ranks"

    train = TorchDistributorOperator(
        task_id="train",
        train=SCRIPT,
        op_args=["--learning-rate", "{{ params.learning_rate }}", "--epochs", "{{ params.epochs }}"],
        num_processes=NUM_PROCESSES,
        retries=1,
        conn_id="spark_cluster",
        spark_conf={"spark.executor.memory": "1g", "spark.app.name": "{{ dag.dag_id }} {{ run_id }}"},
        max_restarts=1,
    )
    report(train.output)


script_on_cluster()
