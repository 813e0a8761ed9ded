"""Facts that Airflow's managers read about this package, its configuration, and Airflow's configuration in ranks.

Airflow imports this module while it configures itself, so nothing here imports Airflow before a function is called.
"""

from __future__ import annotations

from typing import Any

from rankzero import __version__
from rankzero.pipeline import store as stores

SECTION = "rankzero"


def _field(label: str, description: str, kind: str | list[str], **schema: Any) -> dict[str, Any]:
    return {"label": label, "description": description, "schema": {"type": kind, **schema}}


CONN_FIELDS = {
    "engine": _field(
        "Engine",
        "spark: a barrier stage on the Spark master above. local: processes of the Airflow worker.",
        "string",
        enum=["spark", "local"],
        default="spark",
    ),
    "store": _field(
        "Store",
        "Root of the run directories: a path that every host sees, or a URL such as s3://bucket/runs.",
        ["string", "null"],
    ),
    "deploy_mode": _field(
        "Deploy mode",
        "client: the driver of a training runs beside the Airflow task. cluster: on the Spark cluster, "
        "where it outlives the task's pod; the store must be one that the cluster sees.",
        "string",
        enum=["client", "cluster"],
        default="client",
    ),
    "use_gpu": _field(
        "Use GPUs", "Give every rank one GPU, unless the task says otherwise.", ["boolean", "null"], default=False
    ),
    "processes_per_task": _field(
        "Ranks per Spark task",
        "How many ranks share one Spark task, unless the task says otherwise.",
        ["integer", "null"],
        minimum=1,
    ),
    "conf": _field(
        "Spark configuration",
        'A JSON object: {"spark.executor.memory": "8g"}. A task\'s spark_conf wins.',
        ["object", "null"],
    ),
}
"""Fields below the standard ones, as Airflow's connection form takes them; they are stored as JSON in ``extra``."""

UI_FIELD_BEHAVIOUR: dict[str, Any] = {
    "hidden-fields": ["schema", "login", "password", "extra"],
    "relabeling": {"host": "Spark master", "port": "Port"},
    "placeholders": {"host": "spark://head, k8s://https://api, yarn or local[4]; empty with engine local"},
}


OPTIONS: dict[str, dict[str, Any]] = {
    "store": {
        "description": "Root of the run directories, a path or an fsspec URL, for tasks whose operator and connection "
        "name none. Empty: the environment variable RANKZERO_STORE, else ~/.rankzero/runs of the worker.",
        "example": "s3://bucket/rankzero",
        "default": "",
        "version_added": "0.1.0",
        "type": "string",
    },
}
"""The options as Airflow's provider information describes them."""


def option(name: str) -> str:
    """Returns the value of an option of the section; empty if it is not set."""
    from airflow_rankzero._compat import conf

    return str(conf.get(SECTION, name, fallback="") or "").strip()


def store_or_default() -> str:
    """Returns the root of run directories for tasks without ``store``, with core's default."""
    return stores.root_of(option("store") or None)


def get_provider_info() -> dict[str, Any]:
    """The provider's description, for the ``apache_airflow_provider`` entry point.

    The plugin is not in it: Airflow loads it by its entry point, also in task processes, and would warn of a second.
    """
    return {
        "package-name": "rankzero",
        "name": "rankzero",
        "description": "Distributed PyTorch as barrier Spark jobs; rank 0's result goes to the next task.",
        "versions": [__version__],
        "connection-types": [
            {
                "connection-type": "rankzero",
                "hook-class-name": "airflow_rankzero.hooks.RankZeroHook",
                "hook-name": "rankzero",
                "ui-field-behaviour": UI_FIELD_BEHAVIOUR,
                "conn-fields": CONN_FIELDS,
            }
        ],
        "extra-links": ["airflow_rankzero.links.SparkUILink", "airflow_rankzero.links.ReportLink"],
        "config": {SECTION: {"description": "Options of the tasks that run distributed PyTorch.", "options": OPTIONS}},
        "task-decorators": [
            {"name": "torch_distributor", "class-name": "airflow_rankzero.decorators.torch_distributor"}
        ],
    }


_DATABASE = ("DATABASE__SQL_ALCHEMY_CONN", "DATABASE__SQL_ALCHEMY_CONN_ASYNC", "CORE__SQL_ALCHEMY_CONN")
_BACKEND = ("SECRETS__BACKEND", "WORKERS__SECRETS_BACKEND")

RANK_ENVIRONMENT = {
    # Importing Airflow opens no database.
    "_AIRFLOW__AS_LIBRARY": "1",
    **{f"AIRFLOW__{name}": "ranks-have-no-database-of-airflow://" for name in _DATABASE},
    **{f"AIRFLOW__{name}": f"{__name__}.NoSecrets" for name in _BACKEND},
    **{f"AIRFLOW__{name}_KWARGS": "" for name in _BACKEND},
}
"""Variables of every rank, in place of the worker's: a rank may run where no Airflow is reachable."""


def __getattr__(name: str) -> Any:
    if name != "NoSecrets":
        raise AttributeError(name)
    from airflow.secrets.base_secrets import BaseSecretsBackend

    class NoSecrets(BaseSecretsBackend):
        """The secrets backend of ranks: refuses every variable and connection, also those of environment variables."""

        def get_variable(self, key: str, *args: Any, **kwargs: Any) -> None:
            raise _refusal("variable", key, f"var.value.{key}")

        def get_connection(self, conn_id: str, *args: Any, **kwargs: Any) -> None:
            raise _refusal("connection", conn_id, f"conn.{conn_id}.password")

    return NoSecrets


def _refusal(kind: str, name: str, template: str) -> BaseException:
    try:
        from airflow.sdk.exceptions import AirflowSecretsBackendAccessDenied as Denied
    except ImportError:
        # Before Airflow 3.2.2, which passes over every Exception of a backend.
        Denied = BaseException  # type: ignore[misc, assignment]

    class LookupInRankError(Denied):
        """Raised in a rank that looks up a variable or connection of Airflow: ranks get values as arguments."""

        __qualname__ = "LookupInRankError"

    return LookupInRankError(
        f"the {kind} {name!r} of Airflow was looked up in a rank, and ranks run outside of Airflow: pass the value as "
        f'an argument of the training, such as "{{{{ {template} }}}}"'
    )
