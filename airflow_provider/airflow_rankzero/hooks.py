"""Connections: where trainings run (`Target`), and the hook of the type ``rankzero``.

Airflow imports this module when it reads a DAG file, so an engine is imported only when it is used.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.sdk import BaseHook

from airflow_rankzero import provider_info
from airflow_rankzero._compat import AirflowNotFoundException, mask_secret
from airflow_rankzero.provider_info import CLIENT, CLUSTER, CONN_FIELDS, LOCAL, SPARK
from rankzero.errors import InvalidJobError, RankZeroError
from rankzero.pipeline import secrets_of, spelt, store

if TYPE_CHECKING:
    from airflow.sdk import Connection

    from rankzero.pipeline import Engine, Examination

logger = logging.getLogger(__name__)

CONNECT_SCHEME = "sc://"
_SCHEMES = ("spark://", "k8s://", CONNECT_SCHEME, "local", "yarn")
_CONF_OF_EXTRA = {"queue": "spark.yarn.queue", "namespace": "spark.kubernetes.namespace"}
# A web form stores every field of a connection, also those without meaning here.
_WITHOUT_EFFECT = frozenset({"spark-binary", "rest-scheme", "rest-port", "yarn_resourcemanager_webapp_address"})


TEST_START_TIMEOUT = 30.0
"""Seconds for ranks to start while a user waits at a web page."""


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
        from airflow.sdk import BaseHook

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
        """The target that the fields describe. Raises InvalidJobError."""
        where = f"connection {connection.conn_id!r}"
        readers = {"rankzero": _of_rankzero, "spark": _of_spark, "spark_connect": _of_spark_connect}
        if connection.conn_type not in readers:
            raise InvalidJobError(
                f"{where} is of type {connection.conn_type!r}; a connection of type 'rankzero', 'spark' or "
                "'spark_connect' is needed"
            )
        return readers[connection.conn_type](connection, where)

    def engine(self, conf: Mapping[str, str] | None = None) -> Engine:
        """Returns the engine that places the ranks there. Raises InvalidJobError for a wrong master or configuration.

        The task's own ``conf`` overrides the connection's. A local engine and a Spark Connect server ignore it, so that
        one DAG runs on each. Values that look secret are masked in Airflow's logs.
        """
        # Here: who only reads a DAG file needs no engine.
        from rankzero import LocalEngine, SparkConnectEngine, SparkEngine, SparkSubmitEngine
        from rankzero.pipeline import embedded_engine

        if self.kind == LOCAL:
            if conf:
                logger.info("the engine is 'local', so spark_conf has no effect")
            return LocalEngine()
        if self.is_connect:
            if conf or self.conf:
                logger.info("a Spark Connect server has its configuration, so spark_conf has no effect")
            return SparkConnectEngine(f"{self.master}{self.parameters}")
        merged = {**self.conf, **(conf or {})}
        mask_secrets(merged)
        if self.master is None and self.deploy_mode == CLIENT:
            return embedded_engine(merged)
        if self.deploy_mode == CLIENT:
            return SparkEngine(master=self.master, conf=merged)
        return SparkSubmitEngine(master=self.master, conf=merged)

    @property
    def is_connect(self) -> bool:
        """True if the master is a Spark Connect server."""
        return self.kind == SPARK and (self.master or "").startswith(CONNECT_SCHEME)

    def __str__(self) -> str:
        if self.kind == LOCAL:
            return "this machine"
        return (self.master or "").partition("/;")[0] or "an embedded local Spark"


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
        machine. It starts no JVM. On Spark Connect, which needs none here, two ranks (or those of one task, if these
        are more) examine the cluster.
        """
        from rankzero.pipeline import examine, find_problems

        here = socket.gethostname()
        try:
            target = self.get_conn()
            given = examined(self.rankzero_conn_id, {})
            if target.is_connect:
                return _say(examine(**given, start_timeout=TEST_START_TIMEOUT), here)
            root = store.root_of(given.pop("store"))
            problems = find_problems(given.pop("engine"), root, **given)
        except RankZeroError as error:
            return False, str(error)
        if problems:
            return False, f"seen from {here}: " + "; ".join(problems)
        return True, (
            f"seen from {here}: nothing stands against a training on {target}, and {root} can be written. "
            f"What its ranks see shows `rankzero doctor --conn-id {self.rankzero_conn_id}`"
        )


def _say(found: Examination, here: str) -> tuple[bool, str]:
    """Returns the outcome of an examination and a message: all problems, or else all findings."""
    from rankzero.pipeline import OK

    wrong = [finding for finding in found.findings if finding.level != OK]
    texts = [
        f"{each.about}: {each.what}" + (f" ({each.mend})" if each.mend else "") for each in wrong or found.findings
    ]
    return found.healthy, f"seen from {here} and by {len(found.ranks)} ranks: " + "; ".join(texts)


def examined(conn_id: str, conf: Mapping[str, str]) -> dict[str, Any]:
    """Returns the arguments of `rankzero.pipeline.examine` for a connection and a Spark configuration.

    ``rankzero doctor --conn-id`` finds it by the entry point ``rankzero.connections``. Raises InvalidJobError.
    """
    target = Target.from_conn_id(conn_id)
    return {
        "engine": target.engine(conf),
        "store": target.store or provider_info.store(),
        "use_gpu": target.use_gpu,
        "processes_per_task": target.processes_per_task or 1,
    }


def _of_rankzero(connection: Connection, where: str) -> Target:
    extra = {name: value for name, value in _read_extra(connection, where).items() if value not in (None, "")}
    unknown = sorted(set(extra) - set(CONN_FIELDS))
    if unknown:
        raise InvalidJobError(
            f"{where} has the field {', '.join(unknown)}, which the type 'rankzero' does not have: "
            f"it has {', '.join(CONN_FIELDS)}"
        )
    kind = str(extra.get("engine", SPARK))
    if kind not in (SPARK, LOCAL):
        raise InvalidJobError(f"{where} has engine {kind!r}; choose 'spark' or 'local'")
    conf = as_text(f"{where}: conf", _object(where, "conf", extra.get("conf", {})))
    mask_secrets(conf)
    count = extra.get("processes_per_task")
    if kind == LOCAL and (unused := [n for n, given in (("host", connection.host), ("conf", conf)) if given]):
        logger.warning("%s: the engine is 'local', so %s has no effect", where, " and ".join(unused))
    return Target(
        kind,
        _master(connection, where) if kind == SPARK else None,
        conf if kind == SPARK else {},
        store=str(extra["store"]) if "store" in extra else None,
        use_gpu=_flag(where, "use_gpu", extra.get("use_gpu", False)),
        processes_per_task=None if count is None else _count(where, "processes_per_task", count),
        deploy_mode=_deploy_mode(where, extra.get("deploy_mode")),
    )


def _of_spark(connection: Connection, where: str) -> Target:
    extra = {name: "" if value is None else str(value) for name, value in _read_extra(connection, where).items()}
    deploy_mode = extra.pop("deploy-mode", None)
    conf = {key: extra.pop(name) for name, key in _CONF_OF_EXTRA.items() if extra.get(name)}
    unused = sorted(name for name, value in extra.items() if value and name not in _WITHOUT_EFFECT)
    if unused:
        logger.warning("%s: the fields %s have no effect; use spark_conf", where, ", ".join(unused))
    return Target(SPARK, _master(connection, where), conf, deploy_mode=_deploy_mode(where, deploy_mode))


def _deploy_mode(where: str, value: object) -> str:
    if value not in (None, "", CLIENT, CLUSTER):
        raise InvalidJobError(f"{where} has deploy mode {value!r}; choose {CLIENT!r} or {CLUSTER!r}")
    return str(value or CLIENT)


def _of_spark_connect(connection: Connection, where: str) -> Target:
    """Reads a connection like the Spark provider's hook: login is the user, password the token."""
    if not connection.host:
        raise InvalidJobError(f"{where} names no host: give that of the Spark Connect server")
    extra = _read_extra(connection, where)
    pairs = {"user_id": connection.login, "token": connection.password}
    if _flag(where, "use_ssl", extra.get("use_ssl") or False):
        pairs["use_ssl"] = "true"
    host = connection.host.removeprefix(CONNECT_SCHEME).rstrip("/")
    address = f"{host}:{connection.port}" if connection.port else host
    parameters = "".join(f";{name}={quote(value, safe='')}" for name, value in pairs.items() if value)
    mask_secrets({"token": connection.password or ""})
    return Target(SPARK, f"{CONNECT_SCHEME}{address}", parameters=f"/{parameters}" if parameters else "")


def _read_extra(connection: Connection, where: str) -> dict[str, Any]:
    # Not extra_dejson: that makes an empty dict of what is no JSON, and the queue would be lost.
    try:
        extra = json.loads(connection.extra or "{}")
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise InvalidJobError(f"the extra field of {where} is not a JSON object")
    return extra


def _master(connection: Connection, where: str) -> str:
    host = connection.host
    if not host:
        raise InvalidJobError(f"{where} names no host: give a master such as spark://host:7077, yarn or local[4]")
    if not host.startswith(_SCHEMES) and "://" in host:
        raise InvalidJobError(
            f"{where} has a host with the scheme {host.partition('://')[0]!r}; a master is spark://host:7077, "
            "sc://host:15002, k8s://..., yarn or local[4]"
        )
    if not host.startswith(_SCHEMES) or _is_host_name(host):
        # spark://host:7077 as the URI of a connection leaves no scheme in its host.
        host = f"spark://{host}"
    if host.startswith(("local", "yarn")):
        return host
    address = host.partition("://")[2].rpartition("://")[2]
    if ":" in address:
        return host
    # Where a Spark standalone master listens unless told otherwise.
    port = connection.port or (7077 if host.startswith("spark://") else None)
    return f"{host}:{port}" if port else host


def _is_host_name(host: str) -> bool:
    """True for ``yarn-gateway`` or ``localhost``: begins like a master, but is none."""
    return "://" not in host and host not in ("yarn", "local") and not host.startswith(("local[", "local-cluster["))


def as_text(name: str, pairs: Mapping[str, Any] | None) -> dict[str, str]:
    """Returns numbers and flags as Spark spells them; None is empty. Raises InvalidJobError with the pairs' ``name``.

    JSON has numbers and flags, and a DAG with ``render_template_as_native_obj`` turns every ``"2"`` into a number.
    """
    if pairs is None:
        return {}
    if not isinstance(pairs, Mapping):
        raise InvalidJobError(f"{name} is a {type(pairs).__name__}; it must map strings to strings")
    texts = {}
    for key, value in pairs.items():
        value = spelt(value)
        if not isinstance(value, str) or not isinstance(key, str):
            raise InvalidJobError(f"{name}[{key!r}] is a {type(value).__name__}; names and values must be strings")
        texts[key] = value
    return texts


def mask_secrets(pairs: Mapping[str, Any]) -> None:
    """Makes Airflow write ``***`` for the secret values in all later log lines and rendered fields of this process."""
    for secret in secrets_of(pairs):
        mask_secret(secret)


def _flag(where: str, name: str, value: object) -> bool:
    # In a URI it is a word.
    word = str(value).lower()
    if word not in ("true", "false"):
        raise InvalidJobError(f"{where} has {name} {value!r}; write true or false")
    return word == "true"


def _count(where: str, name: str, value: object) -> int:
    if isinstance(value, bool) or not str(value).isdecimal() or int(str(value)) < 1:
        raise InvalidJobError(f"{where} has {name} {value!r}; it must be a whole number from 1 on")
    return int(str(value))


def _object(where: str, name: str, value: object) -> Mapping[str, Any]:
    """Returns a JSON object, also from its text. The InvalidJobError has no value: it may hold credentials."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, Mapping):
        raise InvalidJobError(f'{where}: {name} is not a JSON object such as {{"spark.executor.memory": "8g"}}')
    return value
