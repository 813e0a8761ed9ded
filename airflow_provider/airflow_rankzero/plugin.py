"""The plugin: every task of every DAG may pull a `ResultRef`, and what Airflow has got is acknowledged."""

from __future__ import annotations

from typing import Any

from airflow.sdk.plugins_manager import AirflowPlugin

from airflow_rankzero import delivery


class RankZeroPlugin(AirflowPlugin):
    """Loaded by Airflow in every task process, by its entry point."""

    name = "rankzero"
    listeners = [delivery]  # noqa: RUF012 - as the base class has it

    @classmethod
    def on_load(cls, *args: Any, **kwargs: Any) -> None:
        """Adds `ResultRef` to the classes that XCom may give back.

        By default Airflow gives back only its own (``[core] allowed_deserialization_classes``).
        """
        from airflow.sdk.serde import allow_class

        from rankzero.values.ref import ResultRef

        allow_class(ResultRef)
