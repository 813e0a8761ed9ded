"""A training that was written for Horovod, as a task: only its environment says that Horovod is here.

On a GPU cluster with ``use_gpu=True`` it is the same function. Without a Spark connection in ``DIGITS_CONN_ID`` a local
Spark is embedded.
"""

import os
from datetime import datetime

import digits
import digits_hvd
from airflow.sdk import Param, dag, task

from airflow_rankzero import TorchDistributorOperator, store_or_default
from rankzero import ResultRef


@dag(
    schedule=None,
    start_date=datetime(2026, 1, 1),
    params={"epochs": Param(25, type="integer", minimum=1)},
    render_template_as_native_obj=True,
    tags=["rankzero"],
)
def horovod_training() -> None:
    """Trains with unchanged Horovod code."""

    @task
    def prepare() -> ResultRef:
        return ResultRef.save(digits.prepare(), f"{store_or_default()}/digits-data")

    @task
    def evaluate(data: ResultRef, model: ResultRef) -> float:
        return digits.accuracy(model.load(), data.load())

    data = prepare()
    train = TorchDistributorOperator(
        task_id="train",
        train=digits_hvd.train,
        op_kwargs={"data": data, "epochs": "{{ params.epochs }}"},
        num_processes=2,
        conn_id=os.environ.get("DIGITS_CONN_ID"),
    )
    evaluate(data, train.output)


horovod_training()
