"""Resolves a connection for ``rankzero doctor --conn-id``, by the entry point ``rankzero.connections``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow_rankzero import config
from airflow_rankzero.connection.target import Target


def examined(conn_id: str, conf: Mapping[str, str]) -> dict[str, Any]:
    """Returns the arguments of `examine` for a connection and a Spark configuration. Raises InvalidJobError."""
    return arguments(Target.from_conn_id(conn_id), conf)


def arguments(target: Target, conf: Mapping[str, str]) -> dict[str, Any]:
    """Returns the arguments of `rankzero.doctor.examine.examine` for a target."""
    return {
        "engine": target.engine(conf),
        "store": target.store or config.store(),
        "use_gpu": target.use_gpu,
        "processes_per_task": target.processes_per_task or 1,
    }
