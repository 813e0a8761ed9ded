"""Hyper-parameter sweep: one distributed training for each setting, the best one is kept.

    prepare, settings -> train [setting 0] [setting 1] [setting 2] -> choose

``train`` is mapped over the settings, so each of them is a task of its own, with its own log, retries and run
directory. The settings are a parameter: trigger the DAG with others, as many as you like. Every training reports its
accuracy on scans that were held out; ``choose`` reads it from the `ResultRef`, and loads the weights of the best only.

Two limits bound how many train at the same time:

- ``pool="gpus", pool_slots=NUM_PROCESSES``: a slot of the pool is a rank (a GPU, with ``use_gpu=True``). Make the pool
  as large as the cluster: ``airflow pools set gpus 8 "GPUs of the training cluster"``. A task whose slots are not free
  stays queued in Airflow. Make the pool first: Airflow does not start tasks of a pool that is not there.
  The pool counts over all DAGs. With ``deferrable=True`` add ``--include-deferred``, since the ranks of a deferred
  task train on.
- ``max_active_tis_per_dagrun=2``: so that one sweep leaves room for others.
"""

import os
from datetime import datetime
from typing import Any

import digits
from airflow.sdk import Param, dag, task

import rankzero.train as rt
from airflow_rankzero import TorchDistributorOperator, store_or_default
from rankzero import ResultRef

NUM_PROCESSES = 2
HELD_OUT = 0.2
SETTINGS = [
    {"lr": 4e-3, "batch_size": 32},
    {"lr": 1e-3, "batch_size": 32},
    {"lr": 1e-5, "batch_size": 64},
]


def train(data: dict[str, Any], epochs: int, lr: float, batch_size: int) -> dict[str, Any]:
    """Trains on every rank and reports how well; the weights are the result."""
    state = digits.train(data, epochs=epochs, lr=lr, batch_size=batch_size)
    rt.report({"accuracy": digits.accuracy(state, data), "lr": lr, "batch_size": batch_size})
    return state


@dag(
    schedule=None,
    start_date=datetime(2026, 1, 1),
    params={
        "epochs": Param(10, type="integer", minimum=1),
        "settings": Param(
            SETTINGS, type="array", minItems=1, items={"type": "object", "required": ["lr", "batch_size"]}
        ),
    },
    # So that params.epochs stays a number.
    render_template_as_native_obj=True,
    tags=["rankzero"],
)
def digits_sweep() -> None:
    """Trains once for each setting and keeps the best model."""

    @task
    def prepare() -> ResultRef:
        """The training scans only: a setting that is chosen by the test scans would be flattered by them."""
        data = digits.prepare()
        images, labels = data["train_images"], data["train_labels"]
        held_out = int(len(labels) * HELD_OUT)
        split = {
            "train_images": images[held_out:].clone(),
            "train_labels": labels[held_out:].clone(),
            "test_images": images[:held_out].clone(),
            "test_labels": labels[:held_out].clone(),
        }
        return ResultRef.save(split, f"{store_or_default()}/digits-data")

    @task
    def settings(params: dict[str, Any]) -> list[dict[str, Any]]:
        return list(params["settings"])

    @task
    def choose(models: list[ResultRef]) -> dict[str, Any]:
        best = max(models, key=lambda model: model.summary["metrics"]["accuracy"])
        # A copy: run directories are removed some day.
        kept = ResultRef.save(best.load(), digits.home() / "models")
        return {"model": kept.to_json(), **best.summary["metrics"]}

    trained = TorchDistributorOperator.partial(
        task_id="train",
        train=train,
        op_args=[prepare(), "{{ params.epochs }}"],
        num_processes=NUM_PROCESSES,
        conn_id=os.environ.get("DIGITS_CONN_ID"),
        pool="gpus",
        pool_slots=NUM_PROCESSES,
        max_active_tis_per_dagrun=2,
        retries=1,
    ).expand(op_kwargs=settings())
    choose(trained.output)


digits_sweep()
