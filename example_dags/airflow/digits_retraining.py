"""Nightly: retrain the digits model on two ranks; replace the champion if the new one is as good; then deploy it.

    digits_retraining, every night:    prepare -> train -> evaluate -> gate -> promote ~~> asset digits_champion
    digits_deployment, on the asset:   deploy

The tensors that ``prepare`` makes and the weights that ``train`` returns pass from task to task as
references. ``train`` is a barrier Spark job on the connection that ``DIGITS_CONN_ID`` names, and on
an embedded local Spark without one.

A promotion updates the asset; a model that does not pass the gate does not, so nothing is deployed that night. The
event of the asset carries what was promoted, for people; the deployment takes the champion of the moment, so that two
promotions in a row, or a deployment by hand, end with the right model.
"""

import os
from datetime import datetime
from typing import Any

import digits
from airflow.sdk import Asset, dag, task
from airflow.sdk.exceptions import AirflowFailException

from airflow_rankzero import TorchDistributorOperator, store_or_default
from rankzero import ResultRef

CHAMPION = Asset("digits_champion")


@dag(schedule="0 3 * * *", start_date=datetime(2026, 1, 1), catchup=False, tags=["rankzero"])
def digits_retraining() -> None:
    """Trains every night and promotes a better model."""

    @task
    def prepare() -> ResultRef:
        return ResultRef.save(digits.prepare(), f"{store_or_default()}/digits-data")

    @task
    def evaluate(data: ResultRef, model: ResultRef) -> float:
        return digits.accuracy(model.load(), data.load())

    @task.short_circuit
    def gate(accuracy: float) -> bool:
        return digits.beats_champion(accuracy)

    @task(outlets=[CHAMPION])
    def promote(accuracy: float, model: ResultRef, outlet_events: Any = None) -> None:
        # A copy: run directories are removed some day, see maintenance.py.
        kept = ResultRef.save(model.load(), digits.home() / "models")
        digits.promote(accuracy, kept.to_json())
        outlet_events[CHAMPION].extra = {"accuracy": accuracy, "uri": kept.uri, "digest": kept.digest}

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


@dag(schedule=[CHAMPION], start_date=datetime(2026, 1, 1), catchup=False, max_active_runs=1, tags=["rankzero"])
def digits_deployment() -> None:
    """Deploys the champion after every promotion."""

    @task(retries=2)
    def deploy() -> dict[str, Any]:
        reigning = digits.champion()
        if reigning is None:
            raise AirflowFailException("there is no champion to deploy: run digits_retraining first")
        # Verifies the checksum, too: weights that were changed or cut off never get into production.
        weights = ResultRef.from_json(reigning["model"]).load()
        return digits.deploy(weights, reigning)

    deploy()


digits_retraining()
digits_deployment()
