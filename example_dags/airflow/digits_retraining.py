"""Nightly: retrain the digits model on two ranks; replace the champion if the new one is as good.

    prepare -> train -> evaluate -> gate -> promote

The tensors that ``prepare`` makes and the weights that ``train`` returns pass from task to task as
references. ``train`` is a barrier Spark job on the connection that ``DIGITS_CONN_ID`` names, and on
an embedded local Spark without one.
"""

import os
from datetime import datetime

import digits
from airflow.sdk import dag, task

from airflow_rankzero import TorchDistributorOperator
from rankzero import ResultRef

STORE = os.environ.get("RANKZERO_STORE", "~/.rankzero/runs")


@dag(schedule="0 3 * * *", start_date=datetime(2026, 1, 1), catchup=False, tags=["rankzero"])
def digits_retraining() -> None:
    """The pipeline."""

    @task
    def prepare() -> ResultRef:
        return ResultRef.save(digits.prepare(), f"{STORE}/digits-data")

    @task
    def evaluate(data: ResultRef, model: ResultRef) -> float:
        return digits.accuracy(model.load(), data.load())

    @task.short_circuit
    def gate(accuracy: float) -> bool:
        return digits.beats_champion(accuracy)

    @task
    def promote(accuracy: float, model: ResultRef) -> None:
        digits.promote(accuracy, model.to_json())

    data = prepare()
    train = TorchDistributorOperator(
        task_id="train",
        train=digits.train,
        op_kwargs={"data": data},
        num_processes=2,
        conn_id=os.environ.get("DIGITS_CONN_ID"),
        max_restarts=1,
        retries=1,
    )
    accuracy = evaluate(data, train.output)
    gate(accuracy) >> promote(accuracy, train.output)


digits_retraining()
