"""What a master's name and Spark's configuration alone say about a job, before and after a JVM is there."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from rankzero.errors import InsufficientSlotsError, InvalidJobError
from rankzero.job import Job

LOCAL = re.compile(r"local(?:\[(\d+|\*)(?:\s*,\s*\d+)?\])?")
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*\]")
_REMOTE = re.compile(r"(spark://.+|yarn|k8s://.+)")

DYNAMIC_ALLOCATION = "spark.dynamicAllocation.enabled"
TASK_CPUS = "spark.task.cpus"
TASK_GPUS = "spark.task.resource.gpu.amount"


def is_master(master: object) -> bool:
    """True for a master that this engine knows how to use."""
    if not isinstance(master, str):
        return False
    return any(pattern.fullmatch(master) for pattern in (LOCAL, _LOCAL_CLUSTER, _REMOTE))


def known_slots(master: str, conf: Mapping[str, str]) -> int | None:
    """Task slots, where the master's name tells."""
    cpus = int(conf.get(TASK_CPUS, "1"))
    if found := LOCAL.fullmatch(master):
        cores = (os.cpu_count() or 1) if found[1] == "*" else int(found[1] or 1)
        return cores // cpus
    if found := _LOCAL_CLUSTER.fullmatch(master):
        return int(found[1]) * (int(found[2]) // cpus)
    return None


def require_slots(job: Job, slots: int, where: str) -> None:
    """Raises InsufficientSlotsError if the tasks cannot all run at once."""
    if slots < job.num_tasks:
        raise InsufficientSlotsError(
            f"num_processes={job.num_processes} needs {job.num_tasks} task slots at once, but {where} has "
            f"{slots}: lower num_processes, raise processes_per_task, or add executors",
            needed=job.num_tasks,
            available=slots,
        )


def refuse_dynamic_allocation(value: str | None) -> None:
    """Raises InvalidJobError if the setting's value is true."""
    if value is not None and value.lower() == "true":
        raise dynamic_allocation_error()


def dynamic_allocation_error() -> InvalidJobError:
    """What Spark says too late, and in other words."""
    return InvalidJobError(
        f"{DYNAMIC_ALLOCATION} is true; Spark runs no barrier stage with dynamic allocation (SPARK-24942): "
        "set it to false and fix the number of executors"
    )


def whole_gpus(amount: str | None) -> int:
    """GPUs of a task by the setting's value. Raises InvalidJobError for none, or a share of one."""
    if amount is None:
        raise InvalidJobError(
            f"use_gpu=True, but {TASK_GPUS} is not set, so Spark gives tasks no GPU: "
            "set it, spark.executor.resource.gpu.amount and a discovery script"
        )
    try:
        whole = int(amount)
    except ValueError:
        whole = 0
    if whole < 1:
        raise InvalidJobError(f"{TASK_GPUS} is {amount!r}; a rank needs a whole GPU: set it to 1 or more")
    return whole


def require_task_gpus(job: Job, amount: str | None) -> None:
    """Raises InvalidJobError if a task's ranks would not get a GPU each."""
    whole = whole_gpus(amount)
    if whole < job.processes_per_task:
        raise InvalidJobError(
            f"{TASK_GPUS} is {whole}, but processes_per_task={job.processes_per_task} ranks of a task "
            "need a GPU each: raise the one or lower the other"
        )


def has_spark_defaults() -> bool:
    """True if a spark-defaults.conf may set what conf does not show."""
    places = [os.environ.get("SPARK_CONF_DIR")]
    if home := os.environ.get("SPARK_HOME"):
        places.append(os.path.join(home, "conf"))
    return any(place and os.path.exists(os.path.join(place, "spark-defaults.conf")) for place in places)
