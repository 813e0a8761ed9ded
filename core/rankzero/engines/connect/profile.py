"""What a task of a stage is given, where the server's settings say something else: Spark's ``TaskResourceProfile``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rankzero.engines.spark.resources import TaskResources

FIRST_WITH_PROFILES = 4
"""The major version of Spark from which on a stage of Spark Connect may have one."""


def can_have_profiles(session: Any) -> bool:
    """True if both ends know of them."""
    import pyspark

    versions = (pyspark.__version__, str(session.version))
    return all(int(version.partition(".")[0]) >= FIRST_WITH_PROFILES for version in versions)


def create_profile(session: Any, resources: TaskResources) -> Any:
    """A profile that the server knows: what `mapInArrow` takes as one.

    pyspark's own class takes the active session of the process for the server's, which this one need not be.
    """
    from pyspark.sql.connect import proto

    amounts = {"cpus": float(resources.cpus), **({"gpu": float(resources.gpus)} if resources.gpus else {})}
    tasks = {name: proto.TaskResourceRequest(resource_name=name, amount=amount) for name, amount in amounts.items()}
    return SimpleNamespace(id=session.client._create_profile(proto.ResourceProfile(task_resources=tasks)))
