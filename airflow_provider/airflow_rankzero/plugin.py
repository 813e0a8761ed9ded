"""The plugin: every task may pull a `ResultRef`; listeners for successes and marks; pages of Airflow's web server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_rankzero import config

if TYPE_CHECKING or config.is_airflow_3():
    from airflow_rankzero import delivery, marks, pages
    from airflow_rankzero._compat import AirflowPlugin, allow_class

    LISTENERS: list[Any] = [delivery, marks]
    APPS = [{"app": pages.LazyApp(), "url_prefix": pages.PREFIX, "name": "rankzero"}]
    MIDDLEWARES = [{"middleware": marks.Deletions, "args": [], "kwargs": {}, "name": "rankzero"}]
else:
    # Airflow 2 loads what it finds installed, and shows the error of a plugin at every command.
    from airflow.plugins_manager import AirflowPlugin

    LISTENERS, APPS, MIDDLEWARES = [], [], []


class RankZeroPlugin(AirflowPlugin):
    """Loaded by Airflow in every task process, by its entry point."""

    name = "rankzero"
    listeners = LISTENERS
    fastapi_apps = APPS
    fastapi_root_middlewares = MIDDLEWARES

    @classmethod
    def on_load(cls, *args: Any, **kwargs: Any) -> None:
        """Adds `ResultRef` to the classes that XCom may give back.

        By default Airflow gives back only its own (``[core] allowed_deserialization_classes``).
        """
        if not LISTENERS:
            return
        from rankzero import ResultRef

        allow_class(ResultRef)
