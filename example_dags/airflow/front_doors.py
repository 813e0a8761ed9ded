"""A training that was written for Ray Train, and one with a decorator, each as a task.

A task of the operator is durable: the next try attaches to its training, or resumes it. A function that starts its
ranks itself, in a plain task, ends with the task.
"""

import os
from datetime import datetime

import digits
import digits_doors
from airflow.sdk import dag, task

from airflow_rankzero import TorchDistributorOperator, store_or_default
from rankzero import ResultRef

EPOCHS = int(os.environ.get("DIGITS_EPOCHS", "25"))


@dag(schedule=None, start_date=datetime(2026, 1, 1), tags=["rankzero"])
def front_doors() -> None:
    """Trains in the style of each launcher; the value of a task is the accuracy."""

    @task
    def prepare() -> ResultRef:
        return ResultRef.save(digits.prepare(), f"{store_or_default()}/digits-data")

    @task
    def ray_train(data: ResultRef) -> float:
        return digits_doors.ray_trainer(data, EPOCHS).fit().return_value

    data = prepare()
    TorchDistributorOperator(
        task_id="decorated",
        train=digits_doors.decorated,
        op_args=[data, EPOCHS],
        num_processes=2,
        conn_id=os.environ.get("DIGITS_CONN_ID"),
    )
    ray_train(data)


front_doors()
