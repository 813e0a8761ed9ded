"""Functions under the names of ``ray.air.session``, which scripts before Ray 2.7 use."""

from __future__ import annotations

from rankzero.compat.ray_train.names import lookup
from rankzero.compat.ray_train.train import TrainContext, get_checkpoint, get_dataset_shard, report

__all__ = [
    "get_checkpoint", "get_dataset_shard", "get_experiment_name", "get_local_rank", "get_local_world_size",
    "get_node_rank", "get_run_id", "get_storage", "get_world_rank", "get_world_size", "report",
]  # fmt: skip

_context = TrainContext()
get_world_size = _context.get_world_size
get_world_rank = _context.get_world_rank
get_local_rank = _context.get_local_rank
get_local_world_size = _context.get_local_world_size
get_node_rank = _context.get_node_rank
get_experiment_name = _context.get_experiment_name
get_storage = _context.get_storage
get_run_id = _context.get_experiment_name

__getattr__ = lookup(__name__)
