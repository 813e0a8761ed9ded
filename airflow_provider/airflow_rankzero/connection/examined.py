"""A connection for ``rankzero doctor --conn-id``, which finds this by the entry point ``rankzero.connections``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow_rankzero import config
from airflow_rankzero.connection.target import Target


def examined(conn_id: str, conf: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of `rankzero.doctor.examine.examine` for a connection.

    Args:
        conn_id: Its id.
        conf: Spark configuration, which wins over the connection's.

    Raises:
        InvalidJobError: there is no such connection, or it cannot be used.
    """
    return arguments(Target.from_conn_id(conn_id), conf)


def arguments(target: Target, conf: Mapping[str, str]) -> dict[str, Any]:
    """The same of a target."""
    return {
        "engine": target.engine(conf),
        "store": target.store or config.store(),
        "use_gpu": target.use_gpu,
        "processes_per_task": target.processes_per_task or 1,
    }
