"""The DAG of `test_airflow_tries_table.py`, also in a process of its own, which the test kills.

python -m tests.airflow.tries_dag DAG_ID FOLDER MARK OPERATOR [worker], where OPERATOR are arguments as JSON
"""

import gc
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.airflow import versions
from tests.tries import tries_table
from tests.tries.tries_table import Place, data_in


def make(dag_id: str, place: Place, *, train: str = "train", lr: float = 0.1, data: str = "here", **more: Any) -> Any:
    """One task that trains.

    Args:
        dag_id: Of the DAG.
        place: Where the training waits.
        train: Name of its function in `tests.tries.tries_table`.
        lr: An argument of it.
        data: Where data lie that it is given by reference.
        more: Arguments of the operator.
    """
    from airflow.sdk import DAG

    from airflow_rankzero import TorchDistributorOperator

    folder = str(place.folder)
    with DAG(dag_id) as dag:
        TorchDistributorOperator(
            task_id="train",
            train=getattr(tries_table, train),
            op_args=[folder],
            op_kwargs={"lr": lr, "given": data_in(folder, data)},
            store=place.store,
            env={"OF_RANK": place.mark},
            retry_delay=timedelta(0),
            # Time for the write of what was reported right before a failure.
            stop_grace=60,
            **{"num_processes": 1, "conn_id": "here", **more},
        )
    return dag


if __name__ == "__main__":
    # A third of the time of Airflow's imports is spent on the search for garbage, of which they make none.
    gc.disable()
    dag_id, folder, mark, operator, *worker = sys.argv[1:]
    # The module of `Place.deploy`; not by a variable, for which the ranks would need a zygote of their own.
    sys.path.insert(0, folder)
    if worker:
        versions.be_a_worker()
    # Registered by the test.
    make(dag_id, Place(Path(folder), mark), **json.loads(operator)).test()
