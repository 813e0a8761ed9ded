"""A long training that holds no worker slot while it runs: ``deferrable=True``.

    prepare -> train (deferred) -> evaluate

``train`` starts the run in a process of its own and gives its slot back; the triggerer waits for the end, and then a
worker takes the result. The run belongs to its directory, so a restart of a worker or of the triggerer costs nothing:
the next try attaches to it. Marking the task failed or clearing it ends the run.

Needed: a running triggerer; a ``store`` that workers and triggerer both see (an object store, or a shared directory);
and workers that outlive the task, not a pod for each task, since the process that drives the run stays on the worker's
host. Should that host be lost, the next try (``retries``) continues from the last checkpoint.
"""

import os
from datetime import datetime, timedelta

import digits
from airflow.sdk import Param, dag, task

from airflow_rankzero import TorchDistributorOperator, store_or_default
from rankzero import ResultRef


@dag(
    schedule=None,
    start_date=datetime(2026, 1, 1),
    params={"epochs": Param(25, type="integer", minimum=1)},
    # So that params.epochs stays a number.
    render_template_as_native_obj=True,
    tags=["rankzero"],
)
def deferred_training() -> None:
    """Trains in a deferrable task, which occupies no worker."""

    @task
    def prepare() -> ResultRef:
        return ResultRef.save(digits.prepare(), f"{store_or_default()}/digits-data")

    @task
    def evaluate(data: ResultRef, model: ResultRef) -> float:
        return digits.accuracy(model.load(), data.load())

    data = prepare()
    train = TorchDistributorOperator(
        task_id="train",
        train=digits.train,
        op_kwargs={"data": data, "epochs": "{{ params.epochs }}"},
        num_processes=2,
        conn_id=os.environ.get("DIGITS_CONN_ID"),
        deferrable=True,
        # Ends an attempt in which no rank makes progress, whatever the reason.
        hang_timeout=600.0,
        max_restarts=1,
        retries=2,
        retry_delay=timedelta(minutes=1),
    )
    evaluate(data, train.output)


deferred_training()
