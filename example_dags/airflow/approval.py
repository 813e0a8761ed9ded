"""A person decides whether the new model replaces the champion.

    prepare -> train -> evaluate -> describe -> approve -> promote

``approve`` waits in Airflow's "Required Actions" and holds no worker slot, however long that takes. The question
shows the new accuracy and that of the champion. Without an answer within `RESPONSE_TIMEOUT` the model is rejected.
After "Reject" ``promote`` is skipped, and the run is a success: an answer is no failure.

Add ``assigned_users=[{"id": "ada", "name": "Ada"}]`` to let only some people answer, and ``notifiers=[...]`` to tell
them. The same question can be answered with a request to Airflow's API.
"""

import os
from datetime import datetime, timedelta

import digits
from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import Param, dag, task

from airflow_rankzero import TorchDistributorOperator, store_or_default
from rankzero import ResultRef

RESPONSE_TIMEOUT = timedelta(days=3)


@dag(
    schedule=None,
    start_date=datetime(2026, 1, 1),
    params={"epochs": Param(25, type="integer", minimum=1)},
    # So that params.epochs stays a number.
    render_template_as_native_obj=True,
    tags=["rankzero"],
)
def digits_approval() -> None:
    """Trains, asks a person for approval, and promotes the model."""

    @task
    def prepare() -> ResultRef:
        return ResultRef.save(digits.prepare(), f"{store_or_default()}/digits-data")

    @task
    def evaluate(data: ResultRef, model: ResultRef) -> float:
        return digits.accuracy(model.load(), data.load())

    @task
    def describe(accuracy: float, model: ResultRef) -> str:
        reigning = digits.champion()
        champion = f"{reigning['accuracy']:.4f}" if reigning else "there is none"
        return f"Accuracy: **{accuracy:.4f}**, champion: {champion}. Weights: `{model.uri}`, {model.size:,} bytes."

    @task
    def promote(accuracy: float, model: ResultRef) -> None:
        # A copy: run directories are removed some day.
        digits.promote(accuracy, ResultRef.save(model.load(), digits.home() / "models").to_json())

    data = prepare()
    train = TorchDistributorOperator(
        task_id="train",
        train=digits.train,
        op_kwargs={"data": data, "epochs": "{{ params.epochs }}"},
        num_processes=2,
        conn_id=os.environ.get("DIGITS_CONN_ID"),
        max_restarts=1,
        retries=1,
    )
    accuracy = evaluate(data, train.output)
    approve = ApprovalOperator(
        task_id="approve",
        subject="Should this model go into production?",
        body=describe(accuracy, train.output),
        defaults=ApprovalOperator.REJECT,
        response_timeout=RESPONSE_TIMEOUT,
    )
    approve >> promote(accuracy, train.output)


digits_approval()
