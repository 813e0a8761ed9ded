"""Everything of Airflow that is private, or has another place in another version: one name for each, for 3.1 to 3.3."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from airflow.sdk.definitions.context import KNOWN_CONTEXT_KEYS as KNOWN_CONTEXT_KEYS
from airflow.sdk.definitions.xcom_arg import PlainXComArg as PlainXComArg

_TASK_RUNNER = "airflow.sdk.execution_time.task_runner"


def _find(name: str, *modules: str) -> Any:
    """Returns a name from the first module that has it."""
    for module in modules:
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(module), name)
    raise ImportError(f"this Airflow has no {name}; rankzero needs Airflow 3.1 or newer")


def _exception(name: str) -> Any:
    return _find(name, "airflow.sdk.exceptions", "airflow.exceptions")


conf = _find("conf", "airflow.sdk", "airflow.configuration")
AirflowPlugin = _find("AirflowPlugin", "airflow.sdk.plugins_manager", "airflow.plugins_manager")
AirflowFailException = _exception("AirflowFailException")
AirflowNotFoundException = _exception("AirflowNotFoundException")
AirflowRescheduleException = _exception("AirflowRescheduleException")
AirflowSkipException = _exception("AirflowSkipException")
TaskDeferralError = _exception("TaskDeferralError")
TaskDeferralTimeout = _exception("TaskDeferralTimeout")
TaskDeferred = _exception("TaskDeferred")


def mask_secret(secret: str) -> None:
    """Makes Airflow write ``***`` for it. The rendered fields that 3.1 stores pass through a masker of its server's."""
    from airflow.sdk import log

    log.mask_secret(secret)
    with contextlib.suppress(ImportError):
        from airflow._shared import secrets_masker

        secrets_masker.mask_secret(secret)


def allow_class(cls: type) -> None:
    """Adds a class to those that XCom may give back in this process. Only Airflow 3.3 has a function for it."""
    serde = _find("serde", "airflow.sdk", "airflow.serialization")
    if hasattr(serde, "allow_class"):
        serde.allow_class(cls)
    else:
        serde._extra_allowed.add(f"{cls.__module__}.{cls.__qualname__}")


def model(name: str) -> Any:
    """Returns one of the models of Airflow's database, such as ``dag.DagModel``. No process of a task may import it."""
    module, _, model = name.rpartition(".")
    return _find(model, f"airflow.models.{module}")


def rows(columns: list[Any], *conditions: Any) -> Any:
    """Queries Airflow's database. No process of a task may."""
    from airflow.utils.session import create_session
    from sqlalchemy import select

    with create_session(scoped=False) as session:
        return session.execute(select(*columns).where(*conditions)).all()


def read_xcom(row: Any) -> Any:
    """Returns the value of a row of the table of XComs, which a backend may keep elsewhere."""
    return _find("XCom", "airflow.sdk.execution_time.xcom").deserialize_value(row)


def task_states(**names: Any) -> dict[str, Any]:
    """Queries the states of task instances in a process that runs none, such as the triggerer."""
    found: dict[str, Any] = _find("RuntimeTaskInstance", "airflow.sdk.execution_time.task_runner").get_task_states(
        **names
    )
    return found


def is_in_process() -> bool:
    """Returns True in ``airflow tasks test``, ``airflow dags test`` and ``dag.test()``: no worker runs the task."""
    comms = getattr(importlib.import_module(_TASK_RUNNER), "SUPERVISOR_COMMS", None)
    return type(comms).__name__ == "InProcessSupervisorComms"


def user_of_request() -> Any:
    """Returns the dependency of a route of FastAPI that gives the user who is logged in to Airflow's pages."""
    return _find("get_user", "airflow.api_fastapi.core_api.security")


def may_read_logs(user: Any, dag_id: str | None) -> bool:
    """Returns True if the user may read the logs of a DAG's tasks; None stands for all DAGs."""
    from airflow.api_fastapi.app import get_auth_manager
    from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity, DagDetails

    details, dag = DagDetails(id=dag_id), model("dag.DagModel")
    # Airflow 3.2 and later.
    if dag_id is not None and hasattr(dag, "get_team_name"):
        details = DagDetails(id=dag_id, team_name=dag.get_team_name(dag_id))
    return get_auth_manager().is_authorized_dag(
        method="GET", access_entity=DagAccessEntity.TASK_LOGS, details=details, user=user
    )
