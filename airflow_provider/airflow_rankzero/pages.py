"""The page of a run in Airflow's web server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow_rankzero import config
from airflow_rankzero._compat import conf
from rankzero.pipeline import store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

PREFIX = "/rankzero"
"""Path of the pages below the address of Airflow."""


def address_of(directory: str) -> str | None:
    """Returns the web address of the report of a run among these pages.

    Args:
        directory: Path or URL of the run directory.

    Returns:
        The address; None for a run of another store, or if ``[api] base_url`` is not set.
    """
    root, _, name = store.normalize(directory).rpartition("/")
    base = _base_url()
    if not base or root != store.normalize(config.store_or_default()):
        return None
    return f"{base}{PREFIX}/runs/{quote(name)}"


def _base_url() -> str:
    return str(conf.get("api", "base_url", fallback="") or "").rstrip("/")


class LazyApp:
    """The ASGI application, created at the first request, since Airflow loads plugins in every task's process, too."""

    def __init__(self) -> None:
        self._app: Callable[..., Awaitable[None]] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serves one request by the application in `pages_app`."""
        if self._app is None:
            from airflow_rankzero.pages_app import app

            self._app = app
        await self._app(scope, receive, send)
