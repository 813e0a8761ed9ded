"""`SparkTarget`: an Airflow connection as the master and the configuration of a SparkSession."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rankzero.errors import InvalidJobError

if TYPE_CHECKING:
    from airflow.sdk import Connection

logger = logging.getLogger(__name__)

STANDALONE_PORT = 7077
"""Where a Spark standalone master listens unless told otherwise."""

_SCHEMES = ("spark://", "k8s://", "local", "yarn")
_CONF_OF_EXTRA = {"queue": "spark.yarn.queue", "namespace": "spark.kubernetes.namespace"}
_DEPLOY_MODE = "deploy-mode"
_SUPPORTED_DEPLOY_MODE = "client"
# A web form stores every field of a connection, also those without meaning here.
_WITHOUT_EFFECT = frozenset({"spark-binary", "rest-scheme", "rest-port", "yarn_resourcemanager_webapp_address"})


@dataclass(frozen=True)
class SparkTarget:
    """Which Spark a connection names.

    Attributes:
        master: As Spark spells it: ``spark://host:port``, ``yarn``, ``k8s://...``, ``local[N]``. None
            is an embedded ``local[N]`` with one slot for every task.
        conf: What the connection's fields say in Spark's own configuration keys.
    """

    master: str | None = None
    conf: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def from_conn_id(conn_id: str | None) -> SparkTarget:
        """Looks a connection of type ``spark`` up.

        Needs no provider of that connection type. Login and password are not used.

        Args:
            conn_id: Id of the connection. None is an embedded Spark.

        Raises:
            InvalidJobError: there is no such connection, it is of another type, or it asks for
                something that a training run cannot have.
        """
        if conn_id is None:
            return SparkTarget()
        from airflow.sdk import BaseHook
        from airflow.sdk.exceptions import AirflowNotFoundException

        try:
            connection = BaseHook.get_connection(conn_id)
        except AirflowNotFoundException:
            raise InvalidJobError(
                f"there is no connection conn_id={conn_id!r}: create one of type 'spark' "
                f"(or AIRFLOW_CONN_{str(conn_id).upper()}), or leave conn_id out for an embedded local Spark"
            ) from None
        return SparkTarget.from_connection(connection)

    @staticmethod
    def from_connection(connection: Connection) -> SparkTarget:
        """The target that the fields describe. Raises InvalidJobError."""
        where = f"connection {connection.conn_id!r}"
        if connection.conn_type == "spark_connect":
            raise InvalidJobError(
                f"{where} is of type 'spark_connect', which this version of rankzero cannot run on: "
                "use a connection of type 'spark' with the cluster's master"
            )
        if connection.conn_type != "spark":
            raise InvalidJobError(
                f"{where} is of type {connection.conn_type!r}; a connection of type 'spark' is needed"
            )
        extra = _read_extra(connection, where)
        deploy_mode = extra.pop(_DEPLOY_MODE, None)
        if deploy_mode and deploy_mode != _SUPPORTED_DEPLOY_MODE:
            raise InvalidJobError(
                f"{where} has deploy-mode {deploy_mode!r}: the driver of a training run lives beside the "
                "Airflow task, so only 'client' is possible; remove deploy-mode"
            )
        conf = {key: extra.pop(name) for name, key in _CONF_OF_EXTRA.items() if extra.get(name)}
        unused = sorted(name for name, value in extra.items() if value and name not in _WITHOUT_EFFECT)
        if unused:
            logger.warning("%s: the fields %s have no effect; use spark_conf", where, ", ".join(unused))
        return SparkTarget(_master(connection, where), conf)


def _read_extra(connection: Connection, where: str) -> dict[str, str]:
    # Not extra_dejson: that makes an empty dict of what is no JSON, and the queue would be lost.
    try:
        extra = json.loads(connection.extra or "{}")
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise InvalidJobError(f"the extra field of {where} is not a JSON object")
    return {str(key): "" if value is None else str(value) for key, value in extra.items()}


def _master(connection: Connection, where: str) -> str:
    host = connection.host
    if not host:
        raise InvalidJobError(f"{where} names no host: give a master such as spark://host:7077, yarn or local[4]")
    if not host.startswith(_SCHEMES) or _is_host_name(host):
        # spark://host:7077 as the URI of a connection leaves no scheme in its host.
        host = f"spark://{host}"
    if host.startswith(("local", "yarn")):
        return host
    address = host.partition("://")[2].rpartition("://")[2]
    if ":" in address:
        return host
    port = connection.port or (STANDALONE_PORT if host.startswith("spark://") else None)
    return f"{host}:{port}" if port else host


def _is_host_name(host: str) -> bool:
    """True for ``yarn-gateway`` or ``localhost``: begins like a master, but is none."""
    return "://" not in host and host not in ("yarn", "local") and not host.startswith(("local[", "local-cluster["))
