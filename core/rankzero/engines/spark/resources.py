"""Resources of a job's task that differ from the settings of a session, also as a profile of Spark Connect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from rankzero.engines.spark.conf import EXECUTOR_CORES, EXECUTOR_GPUS, LOCAL, TASK_CPUS, TASK_GPUS
from rankzero.errors import InvalidJobError
from rankzero.job import Job

FIRST_WITH_PROFILES = 4
"""The first major version of Spark in which a stage of Spark Connect may have a profile."""


@dataclass(frozen=True)
class TaskResources:
    """The resources of one task, which Spark represents as a ``TaskResourceProfile``.

    Attributes:
        cpus: Number of cores.
        gpus: Number of whole GPUs.
    """

    cpus: int
    gpus: int

    @property
    def settings(self) -> dict[str, str]:
        """The settings of a session that gives every task these resources."""
        return {TASK_CPUS: str(self.cpus), TASK_GPUS: str(self.gpus)}


def task_resources(job: Job, master: str, settings: Mapping[str, str]) -> TaskResources | None:
    """Returns the resources of a task if the session's settings give too few; None if they suffice.

    Args:
        job: The job that runs.
        master: Master of the session.
        settings: Settings of the session.

    Raises:
        InvalidJobError: Spark cannot give a task these resources; the message names the setting to change.
    """
    has = TaskResources(int(settings.get(TASK_CPUS, "1")), _whole(settings.get(TASK_GPUS)))
    cpus = (job.cpus_per_process or 0) * job.processes_per_task or has.cpus
    is_local = LOCAL.fullmatch(master) is not None
    of_executor = _whole(settings.get(EXECUTOR_GPUS))
    lacks_gpus = job.use_gpu and not is_local and has.gpus < job.processes_per_task <= of_executor
    if cpus == has.cpus and not lacks_gpus:
        return None
    if is_local:
        raise InvalidJobError(
            f"cpus_per_process={job.cpus_per_process} asks for {cpus} cores for each task, but the session at "
            f"{master!r} has {TASK_CPUS}={has.cpus}, and a local master has no resource profiles: set it to {cpus}"
        )
    cores = settings.get(EXECUTOR_CORES, "")
    if cores.isdecimal() and int(cores) < cpus:
        raise InvalidJobError(
            f"cpus_per_process={job.cpus_per_process} asks for {cpus} cores for each task, more than an executor has "
            f"({EXECUTOR_CORES}={cores}): lower cpus_per_process or processes_per_task"
        )
    return TaskResources(cpus, job.processes_per_task if lacks_gpus else has.gpus)


def _whole(amount: str | None) -> int:
    return int(amount) if amount and amount.isdecimal() else 0


def can_have_profiles(session: Any) -> bool:
    """Returns True if both client and server support profiles."""
    import pyspark

    versions = (pyspark.__version__, str(session.version))
    return all(int(version.partition(".")[0]) >= FIRST_WITH_PROFILES for version in versions)


def create_profile(session: Any, resources: TaskResources) -> Any:
    """Creates a profile on the server and returns an object that `mapInArrow` accepts for it.

    pyspark's own class would use the active session of the process, which may belong to another server.
    """
    from pyspark.sql.connect import proto

    amounts = {"cpus": float(resources.cpus), **({"gpu": float(resources.gpus)} if resources.gpus else {})}
    tasks = {name: proto.TaskResourceRequest(resource_name=name, amount=amount) for name, amount in amounts.items()}
    return SimpleNamespace(id=session.client._create_profile(proto.ResourceProfile(task_resources=tasks)))
