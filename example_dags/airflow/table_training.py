"""From a Spark table to a scored table: features, training on their rows, scores, the champion's gate.

Ranks read Spark's files themselves, each its share, and write their part of the scores.
"""

import os
from datetime import datetime

import digits
import digits_table
from airflow.sdk import Param, dag, task

from airflow_rankzero import TorchDistributorOperator
from rankzero import ResultRef


@dag(
    schedule=None,
    start_date=datetime(2026, 1, 1),
    params={"epochs": Param(3, type="integer", minimum=1)},
    render_template_as_native_obj=True,
    tags=["rankzero"],
)
def table_training() -> None:
    """Trains on the rows of a table."""

    @task
    def features() -> dict[str, str]:
        return digits_table.write_features(str(digits.home() / "features"))

    @task.short_circuit
    def gate(scores: ResultRef) -> bool:
        return digits.beats_champion(digits_table.accuracy(scores.load()))

    @task
    def promote(scores: ResultRef, model: ResultRef) -> dict[str, object]:
        kept = ResultRef.save(model.load(), digits.home() / "models")
        return digits.promote(digits_table.accuracy(scores.load()), kept.to_json())

    tables = features()
    on_two_ranks = {"num_processes": 2, "conn_id": os.environ.get("DIGITS_CONN_ID"), "dataset": tables}
    train = TorchDistributorOperator(
        task_id="train", train=digits_table.train, op_kwargs={"epochs": "{{ params.epochs }}"}, **on_two_ranks
    )
    score = TorchDistributorOperator(task_id="score", train=digits_table.score, op_args=[train.output], **on_two_ranks)
    gate(score.output) >> promote(score.output, train.output)


table_training()
