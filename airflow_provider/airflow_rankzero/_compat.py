"""What has another place in another Airflow: one name for each, for Airflow 3.1 to 3.3."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

try:
    from airflow.sdk import conf
    from airflow.sdk.exceptions import (
        AirflowException,
        AirflowFailException,
        AirflowNotFoundException,
        AirflowRescheduleException,
        AirflowSkipException,
        TaskDeferralError,
        TaskDeferralTimeout,
        TaskDeferred,
    )
    from airflow.sdk.plugins_manager import AirflowPlugin
except ImportError:
    # 3.1
    from airflow.configuration import conf  # type: ignore[assignment]
    from airflow.exceptions import (  # type: ignore[attr-defined, no-redef]
        AirflowException,
        AirflowFailException,
        AirflowNotFoundException,
        AirflowRescheduleException,
        AirflowSkipException,
        TaskDeferralError,
        TaskDeferralTimeout,
        TaskDeferred,
    )
    from airflow.plugins_manager import AirflowPlugin  # type: ignore[assignment]

__all__ = [
    "AirflowException",
    "AirflowFailException",
    "AirflowNotFoundException",
    "AirflowPlugin",
    "AirflowRescheduleException",
    "AirflowSkipException",
    "TaskDeferralError",
    "TaskDeferralTimeout",
    "TaskDeferred",
    "allow_class",
    "conf",
    "extra_of_alias",
    "is_in_process",
    "mask_secret",
]


def mask_secret(secret: str) -> None:
    """Makes Airflow write ``***`` for it. The rendered fields that 3.1 stores pass through a masker of its server's."""
    from airflow.sdk import log

    log.mask_secret(secret)
    with contextlib.suppress(ImportError):
        from airflow._shared import secrets_masker

        secrets_masker.mask_secret(secret)


def allow_class(cls: type) -> None:
    """Adds a class to those that XCom may give back in this process. Only Airflow 3.3 has a function for it."""
    try:
        from airflow.sdk import serde
    except ImportError:
        # 3.1
        from airflow.serialization import serde  # type: ignore[attr-defined, no-redef]
    if hasattr(serde, "allow_class"):
        serde.allow_class(cls)
    else:
        serde._extra_allowed.add(f"{cls.__module__}.{cls.__qualname__}")


def is_in_process() -> bool:
    """Returns True in ``airflow tasks test``, ``airflow dags test`` and ``dag.test()``: no worker runs the task."""
    from airflow.sdk.execution_time import task_runner

    return type(getattr(task_runner, "SUPERVISOR_COMMS", None)).__name__ == "InProcessSupervisorComms"


def extra_of_alias(facts: dict[str, Any]) -> dict[str, Any]:
    """Returns facts that the event of an asset alias can store: before Airflow 3.1.4, nested values become JSON."""
    from airflow import __version__

    if tuple(int(part) for part in re.findall(r"\d+", __version__)[:3]) >= (3, 1, 4):
        return facts
    # An older server hashes the values, and for nested ones fails the task that has succeeded.
    return {name: json.dumps(value) if isinstance(value, dict | list) else value for name, value in facts.items()}
