"""The plugin: every task may pull a `ResultRef`; the listeners; the page of a run in Airflow's web server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_rankzero import _compat, links, listeners, provider_info

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
    from fastapi import Depends, FastAPI, Response

    from rankzero.errors import RankZeroError
    from rankzero.pipeline import page

    app = FastAPI(title="rankzero", openapi_url=None)

    # No coroutine: it reads a store and queries a database, in a thread of FastAPI.
    @app.get("/runs/{name:path}", response_model=None)
    def show(name: str, user: Any = Depends(_compat.user_of_request())) -> Any:  # noqa: B008
        """Serves the report of a run to a user who is logged in."""
        try:
            run = page.run_of(provider_info.store_or_default(), name)
            dag_id = run.job.labels.get("dag_id")
            if not _compat.may_read_logs(user, dag_id if isinstance(dag_id, str) else None):
                raise ValueError("no run lives there")
            return Response(page.draw(run), 200, page.HEADERS, "text/html; charset=utf-8")
        except (RankZeroError, OSError, ValueError):
            return Response(f"there is no run {name!r} that you may see", 404, page.HEADERS, "text/plain")

    return app


class RankZeroPlugin(_compat.AirflowPlugin):  # type: ignore[misc]
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

        _compat.allow_class(ResultRef)
