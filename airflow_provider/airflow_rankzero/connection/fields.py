"""The form of a connection of type ``rankzero``: what Airflow's web page asks for, and how the answers are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rankzero.errors import InvalidJobError

SPARK = "spark"
LOCAL = "local"

CLIENT = "client"
CLUSTER = "cluster"

CONN_FIELDS: dict[str, dict[str, Any]] = {
    "engine": {
        "label": "Engine",
        "description": "spark: a barrier stage on the Spark master above. local: processes of the Airflow worker.",
        "schema": {"type": "string", "enum": [SPARK, LOCAL], "default": SPARK},
    },
    "store": {
        "label": "Store",
        "description": "Root of the run directories: a path that every host sees, or a URL such as s3://bucket/runs.",
        "schema": {"type": ["string", "null"]},
    },
    "deploy_mode": {
        "label": "Deploy mode",
        "description": "client: the driver of a training runs beside the Airflow task. cluster: on the Spark cluster, "
        "where it outlives the task's pod; the store must be one that the cluster sees.",
        "schema": {"type": "string", "enum": [CLIENT, CLUSTER], "default": CLIENT},
    },
    "use_gpu": {
        "label": "Use GPUs",
        "description": "Give every rank one GPU, unless the task says otherwise.",
        "schema": {"type": ["boolean", "null"], "default": False},
    },
    "processes_per_task": {
        "label": "Ranks per Spark task",
        "description": "How many ranks share one Spark task, unless the task says otherwise.",
        "schema": {"type": ["integer", "null"], "minimum": 1},
    },
    "conf": {
        "label": "Spark configuration",
        "description": 'A JSON object: {"spark.executor.memory": "8g"}. A task\'s spark_conf wins.',
        "schema": {"type": ["object", "null"]},
    },
}
"""Fields below the standard ones, as Airflow's connection form takes them; they are stored as JSON in ``extra``."""

UI_FIELD_BEHAVIOUR: dict[str, Any] = {
    "hidden-fields": ["schema", "login", "password", "extra"],
    "relabeling": {"host": "Spark master", "port": "Port"},
    "placeholders": {"host": "spark://head, k8s://https://api, yarn or local[4]; empty with engine local"},
}


def read_flag(where: str, name: str, value: object) -> bool:
    """A flag of the form, or of a URI, where it is a word. Raises InvalidJobError."""
    word = str(value).lower()
    if word not in ("true", "false"):
        raise InvalidJobError(f"{where} has {name} {value!r}; write true or false")
    return word == "true"


def read_count(where: str, name: str, value: object) -> int:
    """A whole number from 1 on. Raises InvalidJobError."""
    if isinstance(value, bool) or not str(value).isdecimal() or int(str(value)) < 1:
        raise InvalidJobError(f"{where} has {name} {value!r}; it must be a whole number from 1 on")
    return int(str(value))


def read_object(where: str, name: str, value: object) -> Mapping[str, Any]:
    """A JSON object, or its text. Raises InvalidJobError, without the value: it may hold credentials."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, Mapping):
        raise InvalidJobError(f'{where}: {name} is not a JSON object such as {{"spark.executor.memory": "8g"}}')
    return value
