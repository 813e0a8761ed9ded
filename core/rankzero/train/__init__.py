"""Functions that training code calls, in a run, in a script under ``torchrun``, or in plain ``python``.

Workers import this package, so it may import only the standard library and torch. torch is imported late, since a
pipeline imports `rankzero.train` where torch is not installed. Outside of a run the functions use the world that
``torchrun`` made, or a world of one rank, so that a training function can be tested without a launcher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankzero import lazy_names
from rankzero.train.checkpoint import Checkpoint
from rankzero.train.context import TrainContext, get_checkpoint, get_context, progress, report, set_result
from rankzero.train.dataset import DatasetShard, get_dataset_shard
from rankzero.train.model import (
    full_state_dict,
    load_full_state_dict,
    prepare_model,
    unwrap_model,
)
from rankzero.train.process_group import (
    all_gather_object,
    barrier,
    broadcast_object,
    ensure_process_group,
    on_rank_zero,
    rank_zero_first,
)
from rankzero.train.rows import write_rows

if TYPE_CHECKING:
    from rankzero.train.data_loader import PreparedDataLoader, prepare_data_loader

__all__ = [
    "Checkpoint",
    "DatasetShard",
    "PreparedDataLoader",
    "TrainContext",
    "all_gather_object",
    "barrier",
    "broadcast_object",
    "ensure_process_group",
    "full_state_dict",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "load_full_state_dict",
    "on_rank_zero",
    "prepare_data_loader",
    "prepare_model",
    "progress",
    "rank_zero_first",
    "report",
    "set_result",
    "unwrap_model",
    "write_rows",
]

lazy_names(__name__, "data_loader.prepare_data_loader data_loader.PreparedDataLoader")
