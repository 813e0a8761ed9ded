"""Connections: where trainings run (`Target`), the hook of the type ``rankzero``, and paths beside a DAG file.

Airflow imports this module when it reads a DAG file, so an engine is imported only when it is used.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.sdk import BaseHook

from airflow_rankzero import _compat, provider_info
from airflow_rankzero._compat import AirflowNotFoundException
from airflow_rankzero.provider_info import CONN_FIELDS
from rankzero.errors import InvalidJobError, RankZeroError
from rankzero.pipeline import secrets_of, store

if TYPE_CHECKING:
    from airflow.sdk import Connection

logger = logging.getLogger(__name__)

SPARK, LOCAL = "spark", "local"
CLIENT, CLUSTER = "client", "cluster"
CONNECT_SCHEME = "sc://"
_SCHEMES = ("spark://", "k8s://", CONNECT_SCHEME)
_CONF_OF_EXTRA = {"queue": "spark.yarn.queue", "namespace": "spark.kubernetes.namespace"}


def mask_secrets(pairs: Mapping[str, Any]) -> None:
    """Makes Airflow write ``***`` for the secret values in all later log lines and rendered fields of this process."""
    for secret in secrets_of(pairs):
        _compat.mask_secret(secret)


@dataclass(frozen=True)
class Target:
    """The engine and the defaults for trainings that a connection describes.

    Attributes:
        kind: ``"spark"``, or ``"local"`` for processes of the machine that runs the Airflow task.
        master: Spark's master: ``spark://host:port``, ``yarn``, ``k8s://...``, ``local[N]``, or a Spark Connect
            server, ``sc://host:port``. None is an embedded ``local[N]`` with one slot for every task, or
            without pyspark the same as the kind ``"local"``.
        conf: Spark configuration. May hold credentials.
        store: Root of the run directories for tasks that give none.
        use_gpu: True assigns one GPU to each rank, for tasks without ``use_gpu``.
        processes_per_task: Ranks in one Spark task, for tasks without ``processes_per_task``; None means one.
        deploy_mode: ``"client"``: a training's driver runs beside the Airflow task. ``"cluster"``: on the cluster.
        parameters: The end of a Spark Connect server's URL: user, token. May hold credentials.
    """

    kind: str = SPARK
    master: str | None = None
    conf: Mapping[str, str] = field(default_factory=dict, repr=False)
    store: str | None = None
    use_gpu: bool = False
    processes_per_task: int | None = None
    deploy_mode: str = CLIENT
    parameters: str = field(default="", repr=False)

    @staticmethod
    def from_conn_id(conn_id: str | None) -> Target:
        """Returns the target of a connection ``rankzero``, ``spark`` or ``spark_connect``; for None an embedded Spark.

        Values of the Spark configuration that look secret are masked in Airflow's logs. Raises InvalidJobError if there
        is no such connection, or it asks for something that a training cannot have.
        """
        if conn_id is None:
            return Target()
        try:
            connection = BaseHook.get_connection(conn_id)
        except (AirflowNotFoundException, ImportError) as missing:
            # Outside of tasks, where the doctor looks, Airflow 3.1 imports what there is in tasks alone.
            raise InvalidJobError(
                f"there is no connection conn_id={conn_id!r}: create one of type 'rankzero' or 'spark' "
                f"(or AIRFLOW_CONN_{str(conn_id).upper()}), or leave conn_id out for an embedded local Spark"
            ) from missing
        return Target.from_connection(connection)

    @staticmethod
    def from_connection(connection: Connection) -> Target:
        """Returns the target that the fields describe. Raises InvalidJobError."""
        readers = {"rankzero": _of_rankzero, "spark": _of_spark, "spark_connect": _of_spark_connect}
        if connection.conn_type not in readers:
            raise InvalidJobError(
                f"connection {connection.conn_id!r} is of type {connection.conn_type!r}; a connection of type "
                "'rankzero', 'spark' or 'spark_connect' is needed"
            )
        return readers[connection.conn_type](_Fields(connection))

    def engine(self, conf: Mapping[str, Any] | None = None) -> Any:
        """Returns the engine that places the ranks there. Raises InvalidJobError for a wrong master or configuration.

        The task's own ``conf`` overrides the connection's. A local engine and a Spark Connect server ignore it, so that
        one DAG runs on each. Values that look secret are masked in Airflow's logs.
        """
        # Here: who only reads a DAG file needs no engine.
        from rankzero import LocalEngine, SparkConnectEngine, SparkEngine, SparkSubmitEngine

        if self.kind == LOCAL:
            if conf:
                logger.info("the engine is 'local', so spark_conf has no effect")
            return LocalEngine()
        if (self.master or "").startswith(CONNECT_SCHEME):
            if conf or self.conf:
                logger.info("a Spark Connect server has its configuration, so spark_conf has no effect")
            return SparkConnectEngine(f"{self.master}{self.parameters}")
        if conf is not None and not isinstance(conf, Mapping):
            raise InvalidJobError(f"spark_conf is a {type(conf).__name__}; it must map names to values")
        merged = {**self.conf, **(conf or {})}
        mask_secrets(merged)
        if self.master is None and self.deploy_mode == CLIENT:
            return SparkEngine.embedded(merged)
        if self.deploy_mode == CLIENT:
            return SparkEngine(master=self.master, conf=merged)
        return SparkSubmitEngine(master=self.master, conf=merged)


class RankZeroHook(BaseHook):
    """Reads a connection of type ``rankzero`` (or ``spark``) and tests whether trainings can run there.

    Args:
        rankzero_conn_id: Id of the connection.

    Example:
        >>> RankZeroHook("gpu_cluster").get_conn().master           # doctest: +SKIP
        'spark://head:7077'
    """

    conn_name_attr = "rankzero_conn_id"
    default_conn_name = "rankzero_default"
    conn_type = "rankzero"
    hook_name = "rankzero"

    def __init__(self, rankzero_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rankzero_conn_id = rankzero_conn_id

    def get_conn(self) -> Target:
        """Returns the target that the connection describes. Raises InvalidJobError."""
        return Target.from_conn_id(self.rankzero_conn_id)

    def test_connection(self) -> tuple[bool, str]:
        """Returns True if no problem would stop a training, and a message with the problems or the checks.

        Airflow calls it on the API server or on a worker; results about Java, GPUs and local paths hold for that
        machine. It starts no JVM and no rank.
        """
        from rankzero.pipeline import examine

        try:
            given = examined(self.rankzero_conn_id, {})
            found = examine(**given, trains=False)
        except RankZeroError as error:
            return False, str(error)
        told = f"seen from {socket.gethostname()}: {found}"
        if found.healthy:
            told += f", with run directories in {store.root_of(given['store'])}. "
            told += f"What its ranks see shows `rankzero doctor --conn-id {self.rankzero_conn_id}`"
        return found.healthy, told


def examined(conn_id: str, conf: Mapping[str, str]) -> dict[str, Any]:
    """Returns the arguments of `rankzero.pipeline.examine` for a connection and a Spark configuration.

    ``rankzero doctor --conn-id`` finds it by the entry point ``rankzero.connections``. Raises InvalidJobError.
    """
    target = Target.from_conn_id(conn_id)
    return {
        "engine": target.engine(conf),
        "store": target.store or provider_info.option("store") or None,
        "use_gpu": target.use_gpu,
        "processes_per_task": target.processes_per_task or 1,
    }


class _Fields:
    """The fields of a connection. Each method raises InvalidJobError with the name of the connection."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.where = connection, f"connection {connection.conn_id!r}"
        # Not extra_dejson, which makes an empty dict of text that is not JSON: the queue would be lost.
        self.extra = {
            name: value
            for name, value in self.object("extra field", connection.extra or {}).items()
            if value not in (None, "")
        }

    def object(self, name: str, value: object) -> Mapping[str, Any]:
        """Returns a JSON object, also from its text. The error does not show the value, which may have credentials."""
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = json.loads(value)
        if not isinstance(value, Mapping):
            raise InvalidJobError(
                f'{self.where}: {name} is not a JSON object such as {{"spark.executor.memory": "8g"}}'
            )
        return value

    def choice(self, name: str, *choices: str) -> str:
        """Returns the choice in a field of the extra, the first one by default. In a URI, a flag is a word."""
        value = self.extra.get(name, choices[0])
        if str(value).lower() not in choices:
            raise InvalidJobError(f"{self.where} has {name} {value!r}; choose {' or '.join(choices)}")
        return str(value).lower()

    def flag(self, name: str) -> bool:
        """Returns a flag of the extra."""
        return self.choice(name, "false", "true") == "true"


def _of_rankzero(fields: _Fields) -> Target:
    extra, where = fields.extra, fields.where
    if unknown := sorted(set(extra) - set(CONN_FIELDS)):
        raise InvalidJobError(
            f"{where} has the field {', '.join(unknown)}, which the type 'rankzero' does not have: "
            f"it has {', '.join(CONN_FIELDS)}"
        )
    kind = fields.choice("engine", SPARK, LOCAL)
    conf = fields.object("conf", extra.get("conf", {}))
    mask_secrets(conf)
    count = extra.get("processes_per_task")
    if count is not None and (isinstance(count, bool) or not str(count).isdecimal() or int(str(count)) < 1):
        raise InvalidJobError(f"{where} has processes_per_task {count!r}; it must be a whole number from 1 on")
    return Target(
        kind,
        _master(fields) if kind == SPARK else None,
        conf if kind == SPARK else {},
        store=str(extra["store"]) if "store" in extra else None,
        use_gpu=fields.flag("use_gpu"),
        processes_per_task=None if count is None else int(str(count)),
        deploy_mode=fields.choice("deploy_mode", CLIENT, CLUSTER),
    )


def _of_spark(fields: _Fields) -> Target:
    conf = {key: str(fields.extra[name]) for name, key in _CONF_OF_EXTRA.items() if name in fields.extra}
    return Target(SPARK, _master(fields), conf, deploy_mode=fields.choice("deploy-mode", CLIENT, CLUSTER))


def _of_spark_connect(fields: _Fields) -> Target:
    """Reads a connection like the Spark provider's hook: login is the user, password the token."""
    connection = fields.connection
    if not connection.host:
        raise InvalidJobError(f"{fields.where} names no host: give that of the Spark Connect server")
    pairs = {"user_id": connection.login, "token": connection.password}
    if fields.flag("use_ssl"):
        pairs["use_ssl"] = "true"
    host = connection.host.removeprefix(CONNECT_SCHEME).rstrip("/")
    address = f"{host}:{connection.port}" if connection.port else host
    parameters = "".join(f";{name}={quote(value, safe='')}" for name, value in pairs.items() if value)
    mask_secrets({"token": connection.password or ""})
    return Target(SPARK, f"{CONNECT_SCHEME}{address}", parameters=f"/{parameters}" if parameters else "")


def _master(fields: _Fields) -> str:
    host, port = fields.connection.host, fields.connection.port
    if not host:
        raise InvalidJobError(
            f"{fields.where} names no host: give a master such as spark://host:7077, yarn or local[4]"
        )
    if host in ("yarn", "local") or host.startswith(("local[", "local-cluster[")):
        return host
    if "://" not in host:
        # spark://host:7077 as the URI of a connection leaves no scheme in its host.
        host = f"spark://{host}"
    if not host.startswith(_SCHEMES):
        raise InvalidJobError(
            f"{fields.where} has a host with the scheme {host.partition('://')[0]!r}; a master is spark://host:7077, "
            "sc://host:15002, k8s://..., yarn or local[4]"
        )
    # A Spark standalone master listens on 7077 unless it is configured otherwise.
    port = port or (7077 if host.startswith("spark://") else None)
    return f"{host}:{port}" if port and ":" not in host.rpartition("://")[2] else host


# -- paths, which begin beside the DAG file: a worker's own directory means nothing, and a git bundle moves -----


def train_beside(folder: str, train: Any) -> Any:
    """Returns ``train`` with the path of a script as an absolute one; a command unchanged.

    Args:
        folder: The folder of the DAG file.
        train: The rendered argument.
    """
    is_module = isinstance(train, str) and (train.startswith("-m ") or (":" in train and os.sep not in train))
    return train if is_module or not isinstance(train, (str, os.PathLike)) else path_beside(folder, train)


def path_beside(folder: str, path: Any) -> Any:
    """Returns a path, or a list of paths, as absolute ones; None and other objects unchanged."""
    if isinstance(path, (list, tuple)):
        return [path_beside(folder, each) for each in path]
    if not isinstance(path, (str, os.PathLike)):
        return path
    return os.path.normpath(os.path.join(folder, os.path.expanduser(os.fspath(path))))


def dataset_beside(folder: str, dataset: Any) -> Any:
    """Returns a dataset, or a dict of them by name, with relative paths as those beside the DAG file.

    Spaces around a text are removed. Names of tables, queries, URLs (also ``file:/x``) and results of other tasks are
    unchanged.
    """
    if isinstance(dataset, Mapping):
        return {name: dataset_beside(folder, source) for name, source in dataset.items()}
    if isinstance(dataset, str):
        dataset = dataset.strip()
    if not isinstance(dataset, (str, PurePath)) or not dataset or store.has_scheme(os.fspath(dataset)):
        return dataset
    from rankzero.pipeline import datasets

    found = path_beside(folder, dataset)
    return found if datasets.is_path(dataset) or os.path.exists(found) else dataset
