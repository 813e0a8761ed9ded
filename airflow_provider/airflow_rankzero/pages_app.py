"""The page of a run: its report, if it is of the configured store. Read only.

Airflow's login protects it: a user sees only the runs of the DAGs whose task logs the user may read. Runs that belong
to no DAG are shown to users who may read the logs of all DAGs.
"""

from __future__ import annotations

from typing import Annotated, Any

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity, DagDetails
from airflow.api_fastapi.core_api.security import get_user
from airflow.models.dag import DagModel
from fastapi import Depends, FastAPI, Response

from airflow_rankzero import config
from rankzero.pipeline import Job, pages, store

app = FastAPI(title="rankzero", openapi_url=None)


# No coroutine: it reads a store and queries a database, in a thread of FastAPI.
@app.get("/runs/{name:path}", response_model=None)
def show(name: str, user: Annotated[Any, Depends(get_user)]) -> Response:
    """Serves the report of a run to a user who is logged in."""
    location = store.normalize(config.store_or_default())
    code, kind, text = pages.answer(location, f"/runs/{name}", {}, lambda job: _may_read_logs(user, job))
    return Response(text.encode("utf-8", "replace"), code, dict(pages.HEADERS), f"{kind}; charset=utf-8")


def _may_read_logs(user: Any, job: Job) -> bool:
    label = job.labels.get("dag_id")
    dag_id = label if isinstance(label, str) else None
    details = DagDetails(id=dag_id)
    # Airflow 3.2 and later.
    if dag_id is not None and hasattr(DagModel, "get_team_name"):
        details = DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id))
    return get_auth_manager().is_authorized_dag(
        method="GET", access_entity=DagAccessEntity.TASK_LOGS, details=details, user=user
    )
