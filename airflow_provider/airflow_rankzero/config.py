"""What this deployment of Airflow says: the section ``[rankzero]`` of its configuration, the container of a task."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from rankzero.errors import InvalidJobError
from rankzero.pipeline import store as stores

SECTION = "rankzero"


def _option(description: str, example: str) -> dict[str, Any]:
    facts = {"description": description, "example": example, "default": ""}
    return {**facts, "version_added": "0.1.0", "type": "string"}


OPTIONS: dict[str, dict[str, Any]] = {
    "store": _option(
        "Root of the run directories, a path or an fsspec URL, for tasks whose operator and connection name none. "
        "Empty: the environment variable RANKZERO_STORE, else ~/.rankzero/runs of the worker.",
        "s3://bucket/rankzero",
    ),
    "directory_url": _option(
        "Where a web browser finds a run directory, for the button 'Run directory' of a task. {path} stands for the "
        "directory without its scheme, {name} for the run's name. Empty: the console of Google Cloud or AWS for gs:// "
        "and s3://, and no button for other stores.",
        "https://minio.example.com/browser/{path}/",
    ),
    "report_url": _option(
        "Where a web browser finds the report of a run, for the button 'Report' of a task: of `rankzero serve`, or of "
        "the file report.html in the run directory. {path} stands for the directory without its scheme, {name} for the "
        "run's name. Empty: the console of Google Cloud or AWS for gs:// and s3://, and no button for other stores.",
        "https://reports.example.com/runs/{name}",
    ),
}
"""The options as Airflow's provider information describes them."""


def is_airflow_3() -> bool:
    """Returns False in Airflow 2, in which this package is inactive and logs nothing."""
    return importlib.util.find_spec("airflow.sdk") is not None


def store() -> str | None:
    """Returns the configured root of run directories for tasks without ``store``; None if there is none."""
    return _text("store") or None


def store_or_default() -> str:
    """Returns the root of run directories for tasks without ``store``, with core's default."""
    return stores.root_of(store())


def directory_url() -> str | None:
    """Returns the template of a run directory's web address, or None. Raises InvalidJobError for other placeholders."""
    return _template("directory_url")


def report_url() -> str | None:
    """Returns the template of the web address of a run's report, or None. Raises like `directory_url`."""
    return _template("report_url")


def _template(option: str) -> str | None:
    template = _text(option)
    try:
        template.format(path="", name="")
    except (KeyError, IndexError, ValueError, AttributeError):
        raise InvalidJobError(
            f"[{SECTION}] {option} is {template!r}; only {{path}} and {{name}} can stand in it"
        ) from None
    return template or None


_TASK_CONTAINER_MARKS = ("AIRFLOW_IS_K8S_EXECUTOR_POD", "AIRFLOW_IS_EXECUTOR_CONTAINER")
# Set by executors that start a container for each task: Kubernetes; AWS ECS and Batch.


def warn_if_container_ends_with_task(log: Any) -> bool:
    """Returns True in a container that is there for this task alone; the log then says why it does not defer."""
    if not any(map(os.environ.get, _TASK_CONTAINER_MARKS)):
        return False
    log.warning(
        "not deferred, although deferrable=True: this container ends when the task defers, and the driver of the "
        "training with it; the task follows the training instead"
    )
    return True


def _text(option: str) -> str:
    from airflow_rankzero._compat import conf

    return str(conf.get(SECTION, option, fallback="") or "").strip()
