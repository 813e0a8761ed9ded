"""Resources of a task that differ from the server's settings, as Spark's ``TaskResourceProfile``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rankzero.engines.spark.resources import TaskResources

FIRST_WITH_PROFILES = 4
"""The first major version of Spark in which a stage of Spark Connect may have a profile."""


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
