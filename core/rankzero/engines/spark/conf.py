"""Checks of a job against the name of a master and Spark's configuration, before and after a JVM exists."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from rankzero.errors import InsufficientSlotsError, InvalidJobError
from rankzero.host.usage import available_cores
from rankzero.job import Job

LOCAL = re.compile(r"local(?:\[(\d+|\*)(?:\s*,\s*\d+)?\])?")
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*\]")
_REMOTE = re.compile(r"(spark://.+:\d+|yarn|k8s://.+)")

MASTER = "spark.master"
DYNAMIC_ALLOCATION = "spark.dynamicAllocation.enabled"
TASK_CPUS = "spark.task.cpus"
TASK_GPUS = "spark.task.resource.gpu.amount"
INSTANCES = "spark.executor.instances"
EXECUTOR_CORES = "spark.executor.cores"
EXECUTOR_GPUS = "spark.executor.resource.gpu.amount"
CORES_MAX = "spark.cores.max"
ENCRYPTION = ("spark.network.crypto.enabled", "spark.ssl.rpc.enabled", "spark.ssl.enabled")
"""Settings, any of which encrypts Spark's connections between driver and executors."""

EXECUTOR_ENV = "spark.executorEnv."
THREADS = f"{EXECUTOR_ENV}OMP_NUM_THREADS"

SETTINGS = (TASK_CPUS, TASK_GPUS, INSTANCES, EXECUTOR_CORES, EXECUTOR_GPUS, CORES_MAX, THREADS, *ENCRYPTION)
"""Settings of a session on which slots, tasks and connections depend."""


def is_master(master: object) -> bool:
    """Returns True for a master that this engine supports."""
    return isinstance(master, str) and any(each.fullmatch(master) for each in (LOCAL, _LOCAL_CLUSTER, _REMOTE))


def most_slots(master: str, conf: Mapping[str, str]) -> int | None:
    """Returns the most task slots a cluster can ever have, as master and conf prove; None if they prove none."""
    cpus = int(conf.get(TASK_CPUS, "1"))
    if found := LOCAL.fullmatch(master):
        # The cores that this process may use, as the JVM counts them, too.
        return (available_cores() if found[1] == "*" else int(found[1] or 1)) // cpus
    if found := _LOCAL_CLUSTER.fullmatch(master):
        return int(found[1]) * (int(found[2]) // cpus)
    if has_fixed_executors(master):
        instances = conf.get(INSTANCES, "")
        return int(instances) * slots_of_executor(conf) if instances.isdecimal() else None
    most = conf.get(CORES_MAX, "")
    return int(most) // cpus if most.isdecimal() else None


def has_fixed_executors(master: str) -> bool:
    """Returns True if Spark starts the configured number of executors; a standalone cluster starts what fits."""
    return master == "yarn" or master.startswith("k8s://")


def slots_of_executor(conf: Mapping[str, str]) -> int:
    """Returns the number of tasks that one executor of a YARN or Kubernetes cluster runs in parallel."""
    slots = int(conf.get(EXECUTOR_CORES, "1")) // int(conf.get(TASK_CPUS, "1"))
    with contextlib.suppress(KeyError, ValueError, ZeroDivisionError):
        slots = min(slots, int(conf[EXECUTOR_GPUS]) // int(conf[TASK_GPUS]))
    return slots


def conf_for(job: Job, master: str, given: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings that a session of the engine requests from its cluster, in addition to the user's.

    Args:
        job: The job, with its largest world.
        master: The cluster.
        given: The user's conf for this run, which is not changed.
        defaults: The settings of spark-defaults.conf, for every run of the host.
    """
    asked = {DYNAMIC_ALLOCATION: "false"} if defaults.get(DYNAMIC_ALLOCATION, "").lower() == "true" else {}
    known = {**defaults, **given}
    if job.cpus_per_process and TASK_CPUS not in given:
        asked[TASK_CPUS] = known[TASK_CPUS] = str(job.cpus_per_process * job.processes_per_task)
    if job.use_gpu and TASK_GPUS not in known and known.get(EXECUTOR_GPUS, "").isdecimal():
        asked[TASK_GPUS] = known[TASK_GPUS] = str(job.processes_per_task)
    if has_fixed_executors(master) and INSTANCES not in given:
        cpus = known.get(TASK_CPUS, "1")
        if EXECUTOR_CORES not in known and cpus != "1":
            asked[EXECUTOR_CORES] = known[EXECUTOR_CORES] = cpus
        # Spark itself refuses an executor that is too small for a task, with a clear message.
        needed = math.ceil(job.num_tasks / max(1, slots_of_executor(known)))
        if needed > int(known.get(INSTANCES, "0")):
            asked[INSTANCES] = str(needed)
    return {name: value for name, value in asked.items() if name not in given}


def require_slots(job: Job, slots: int, where: str) -> None:
    """Raises InsufficientSlotsError if the tasks cannot all run in parallel."""
    if slots < job.least_tasks:
        raise InsufficientSlotsError(
            f"num_processes={job.world} needs {job.least_tasks} task slots at the same time, but {where} has "
            f"{slots}: lower num_processes, raise processes_per_task, or add executors",
        )


def refuse_dynamic_allocation(value: str | None) -> None:
    """Raises InvalidJobError if the value of the setting is true, which Spark reports late and less clearly."""
    if value is not None and value.lower() == "true":
        raise InvalidJobError(
            f"{DYNAMIC_ALLOCATION} is true; Spark runs no barrier stage with dynamic allocation (SPARK-24942): "
            "set it to false and fix the number of executors",
            code="RZ-1011",
        )


def whole_gpus(amount: str | None) -> int:
    """Returns the GPUs of a task from the setting's value. Raises InvalidJobError for none, or a share of one."""
    if amount is None:
        raise InvalidJobError(
            f"use_gpu=True, but {TASK_GPUS} is not set, so Spark gives tasks no GPU: "
            "set it, spark.executor.resource.gpu.amount and a discovery script"
        )
    if not _whole(amount):
        raise InvalidJobError(f"{TASK_GPUS} is {amount!r}; a rank needs a whole GPU: set it to 1 or more")
    return int(amount)


def require_task_gpus(job: Job, amount: str | None) -> None:
    """Raises InvalidJobError if a task would not get a GPU for each of its ranks."""
    whole = whole_gpus(amount)
    if whole < job.processes_per_task:
        raise InvalidJobError(
            f"{TASK_GPUS} is {whole}, but processes_per_task={job.processes_per_task} ranks of a task "
            "need a GPU each: raise the one or lower the other"
        )


def spark_home() -> str:
    """Returns ``SPARK_HOME``, else the folder of the installed pyspark."""
    if home := os.environ.get("SPARK_HOME"):
        return home
    found = importlib.util.find_spec("pyspark")
    return os.path.dirname(found.origin) if found and found.origin else os.devnull


def spark_defaults() -> dict[str, str]:
    """Returns the settings of this host's spark-defaults.conf, which apply to a session but are not in its conf."""
    place = os.environ.get("SPARK_CONF_DIR") or os.path.join(spark_home(), "conf")
    with contextlib.suppress(OSError), open(os.path.join(place, "spark-defaults.conf"), errors="replace") as file:
        return dict(filter(None, map(_setting, file)))
    return {}


def _setting(line: str) -> tuple[str, str] | None:
    """Returns name and value of a line, as Java parses it: ``name value``, ``name=value`` or ``name: value``."""
    found = re.fullmatch(r"\s*([^#!\s=:][^\s=:]*)\s*[=:]?\s*(.*?)\s*", line)
    return (found[1], found[2]) if found else None


def task_resources(job: Job, master: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings of the profile that a task needs if the session's settings give too little; else none.

    Raises:
        InvalidJobError: Spark cannot give a task these resources; the message names the setting to change.
    """
    has, gpus = int(settings.get(TASK_CPUS, "1")), _whole(settings.get(TASK_GPUS))
    cpus = (job.cpus_per_process or 0) * job.processes_per_task or has
    is_local = LOCAL.fullmatch(master) is not None
    if job.use_gpu and not is_local and gpus < job.processes_per_task <= _whole(settings.get(EXECUTOR_GPUS)):
        gpus = job.processes_per_task
    elif cpus == has:
        return {}
    if is_local:
        raise InvalidJobError(
            f"cpus_per_process={job.cpus_per_process} asks for {cpus} cores for each task, but the session at "
            f"{master!r} has {TASK_CPUS}={has}, and a local master has no resource profiles: set it to {cpus}"
        )
    cores = settings.get(EXECUTOR_CORES, "")
    if cores.isdecimal() and int(cores) < cpus:
        raise InvalidJobError(
            f"cpus_per_process={job.cpus_per_process} asks for {cpus} cores for each task, more than an executor has "
            f"({EXECUTOR_CORES}={cores}): lower cpus_per_process or processes_per_task"
        )
    return {TASK_CPUS: str(cpus), TASK_GPUS: str(gpus)}


def _whole(amount: str | None) -> int:
    return int(amount) if amount and amount.isdecimal() else 0


def create_profile(session: Any, resources: Mapping[str, str]) -> Any:
    """Creates a profile on a server of Spark 4, and returns an object that `mapInArrow` accepts for it.

    pyspark's own class would use the active session of the process, which may belong to another server.
    """
    from pyspark.sql.connect import proto

    amounts = {"cpus": float(resources[TASK_CPUS]), "gpu": float(resources[TASK_GPUS])}
    tasks = {
        name: proto.TaskResourceRequest(resource_name=name, amount=amount) for name, amount in amounts.items() if amount
    }
    return SimpleNamespace(id=session.client._create_profile(proto.ResourceProfile(task_resources=tasks)))
