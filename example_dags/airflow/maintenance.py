"""Daily: removes the directories of runs that ended more than 30 days ago (the parameter ``days``).

What belongs to a run lies in its directory: logs, checkpoints, rank 0's result. This removes them together, so copy
what must live longer (`digits_retraining.py` does so with every champion). A run that lives is never touched.

It looks after one store, that of ``[rankzero] store`` in Airflow's configuration (else $RANKZERO_STORE, else
~/.rankzero/runs), as the worker that runs it sees it. A store that a connection or an operator names, and
the local disks of other workers, need a task of their own (or ``rankzero gc`` there).

To see what would go, trigger it by hand with ``{"dry_run": true}`` and look at the log or at the task's XCom.
"""

import logging
from dataclasses import asdict
from datetime import datetime
from typing import Any

from airflow.sdk import Param, dag, task

from airflow_rankzero import store_or_default
from rankzero.run.retention import collect

DAY = 86400.0

logger = logging.getLogger(__name__)


@dag(
    schedule="@daily",
    start_date=datetime(2026, 1, 1),
    catchup=False,
    # Two at a time would do no harm, and no good either.
    max_active_runs=1,
    params={
        "days": Param(30, type="integer", minimum=1, description="Age of the end of a run that is removed."),
        "dry_run": Param(False, type="boolean", description="Remove nothing, show what would be removed."),
    },
    tags=["rankzero"],
)
def rankzero_maintenance() -> None:
    """Removes run directories that are no longer needed."""

    @task(retries=2)
    def collect_runs(params: dict[str, Any]) -> dict[str, Any]:
        collection = collect(store_or_default(), older_than=params["days"] * DAY, dry_run=params["dry_run"])
        for removed in collection.removed:
            logger.info("%s, %s", removed.directory, removed.state)
        for directory, problem in collection.problems.items():
            logger.warning("%s stays: %s", directory, problem)
        logger.info("%s removed, %s runs stay", len(collection.removed), collection.kept)
        if collection.problems:
            raise RuntimeError(f"{len(collection.problems)} directories could not be looked at; see the log above")
        return asdict(collection)

    collect_runs()


rankzero_maintenance()
