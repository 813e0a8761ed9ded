"""The plugin that lets every task of every DAG pull a `ResultRef`, with nothing configured."""

from __future__ import annotations

from typing import Any

from airflow.sdk.plugins_manager import AirflowPlugin


class RankZeroPlugin(AirflowPlugin):
    """Loaded by Airflow in every task process, by its entry point."""

    name = "rankzero"

    @classmethod
    def on_load(cls, *args: Any, **kwargs: Any) -> None:
        """Adds `ResultRef` to the classes that XCom may give back.

        By default Airflow gives back only its own (``[core] allowed_deserialization_classes``).
        """
        from airflow.sdk.serde import allow_class

        from rankzero.values.ref import ResultRef

        allow_class(ResultRef)
