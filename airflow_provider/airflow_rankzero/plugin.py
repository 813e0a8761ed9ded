"""The plugin: every task may pull a `ResultRef`; the listeners; the page of a run in Airflow's web server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_rankzero import links, listeners, provider_info
from airflow_rankzero._compat import AirflowPlugin, allow_class

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class RunPages:
    """The page of a run: its report, if it is of the configured store. Read only.

    Airflow's login protects it: a user sees only the runs of the DAGs whose task logs the user may read. Runs that
    belong to no DAG are shown to users who may read the logs of all DAGs.

    It is an ASGI application, created at the first request, since Airflow loads plugins in every task's process, too.
    """

    def __init__(self) -> None:
        self._app: Callable[..., Awaitable[None]] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serves one request of a web browser by the application."""
        if self._app is None:
            self._app = _create_app()
        await self._app(scope, receive, send)


def _create_app() -> Any:
    from airflow.api_fastapi.core_api.security import get_user
    from fastapi import Depends, FastAPI, Response

    from rankzero.errors import RankZeroError
    from rankzero.pipeline import page

    app = FastAPI(title="rankzero", openapi_url=None)

    # No coroutine: it reads a store and queries a database, in a thread of FastAPI.
    @app.get("/runs/{name:path}", response_model=None)
    def show(name: str, user: Any = Depends(get_user)) -> Any:  # noqa: B008
        """Serves the report of a run to a user who is logged in."""
        try:
            run = page.run_of(provider_info.store_or_default(), name)
            if not _may_read_logs(user, run.labels.get("dag_id")):
                raise ValueError("no run lives there")
            return Response(page.draw(run), 200, page.HEADERS, "text/html; charset=utf-8")
        except (RankZeroError, OSError, ValueError):
            return Response(f"there is no run {name!r} that you may see", 404, page.HEADERS, "text/plain")

    return app


def _may_read_logs(user: Any, label: Any) -> bool:
    from airflow.api_fastapi.app import get_auth_manager
    from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity, DagDetails
    from airflow.models.dag import DagModel

    dag_id = label if isinstance(label, str) else None
    details = DagDetails(id=dag_id)
    # Airflow 3.2 and later.
    if dag_id is not None and hasattr(DagModel, "get_team_name"):
        details = DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id))
    return get_auth_manager().is_authorized_dag(
        method="GET", access_entity=DagAccessEntity.TASK_LOGS, details=details, user=user
    )


class RankZeroPlugin(AirflowPlugin):  # type: ignore[misc]
    """Loaded by Airflow in every task process, by its entry point."""

    name = "rankzero"
    listeners = [listeners]  # noqa: RUF012
    fastapi_apps = [{"app": RunPages(), "url_prefix": links.PAGES, "name": "rankzero"}]  # noqa: RUF012

    @classmethod
    def on_load(cls, *args: Any, **kwargs: Any) -> None:
        """Adds `ResultRef` to the classes that XCom may give back.

        By default Airflow gives back only its own (``[core] allowed_deserialization_classes``).
        """
        from rankzero import ResultRef

        allow_class(ResultRef)
