"""``ray.air.session``, as scripts before Ray 2.7 spell it; right on every worker."""

from __future__ import annotations

import rankzero.train as rt
from rankzero.compat.ray_train.train import get_checkpoint, get_dataset_shard, report

__all__ = [
    "get_checkpoint",
    "get_dataset_shard",
    "get_experiment_name",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_world_rank",
    "get_world_size",
    "report",
]


def get_world_size() -> int:
    """Number of workers."""
    return rt.get_context().world_size


def get_world_rank() -> int:
    """Rank of this worker."""
    return rt.get_context().rank


def get_local_rank() -> int:
    """Index of this worker in its task."""
    return rt.get_context().local_rank


def get_local_world_size() -> int:
    """Workers in this task."""
    return rt.get_context().local_world_size


def get_node_rank() -> int:
    """Index of the task."""
    return rt.get_context().node_rank


def get_experiment_name() -> str:
    """Name of the run."""
    return rt.get_context().run_id
