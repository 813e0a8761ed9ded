"""Functions for training functions under the names of ``ray.train``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import rankzero.train as rt
from rankzero.compat.ray_train import collective, torch
from rankzero.compat.ray_train.configs import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from rankzero.compat.ray_train.result import Checkpoint, Result
from rankzero.errors import RankZeroError as TrainingFailedError

if TYPE_CHECKING:
    from rankzero.compat.ray_train.dataset import DatasetShard, TableShard

__all__ = [
    "Checkpoint",
    "CheckpointConfig",
    "FailureConfig",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "TrainContext",
    "TrainingFailedError",
    "collective",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "report",
    "torch",
]


class TrainContext:
    """The ranks and the run of this worker, under Ray's names."""

    def get_world_size(self) -> int:
        """Returns the number of workers."""
        return rt.get_context().world_size

    def get_world_rank(self) -> int:
        """Returns the rank of this worker."""
        return rt.get_context().rank

    def get_local_rank(self) -> int:
        """Returns the index of this worker in its task."""
        return rt.get_context().local_rank

    def get_local_world_size(self) -> int:
        """Returns the number of workers in this task."""
        return rt.get_context().local_world_size

    def get_node_rank(self) -> int:
        """Returns the index of this worker's task."""
        return rt.get_context().node_rank

    def get_experiment_name(self) -> str:
        """Returns the name of the run."""
        return rt.get_context().run_id

    def get_storage(self) -> str | None:
        """Returns the run directory if this host sees it; else None."""
        return rt.get_context().storage_path


def get_context() -> TrainContext:
    """Returns the context of this worker."""
    return TrainContext()


def report(metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None, **options: Any) -> None:
    """Reports metrics, and optionally a checkpoint. Like Ray's, it is a barrier: each worker must call it.

    A worker that fails after a report therefore loses no checkpoint of that report: those of all workers have been
    copied, and are written before the attempt ends. Rank 0's checkpoint becomes the run's. Ray merges the directories
    of all workers. Here a directory with files that rank 0's lacks is refused; report it with
    `rankzero.train.report` and ``sharded=True``.

    Args:
        metrics: Name to number or string.
        checkpoint: The checkpoint from `Checkpoint.from_directory`; its directory may be deleted after this call.
        options: Ray's options for uploads and validation, which are refused.

    Raises:
        TypeError: an option was given; ``checkpoint`` is not a `Checkpoint`, or has files that would be lost.
        ResultError: the checkpoint cannot be written.
    """
    if options:
        raise TypeError(f"report has no {', '.join(sorted(options))} here: checkpoints go to the run's store")
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        raise TypeError(f"checkpoint is a {type(checkpoint).__name__}; give Checkpoint.from_directory(path)")
    rt.report(metrics, checkpoint=checkpoint.path if checkpoint else None)
    if rt.get_context().world_size > 1 and _has_group():
        _check_files(rt.all_gather_object(_files(checkpoint)))


def _files(checkpoint: Checkpoint | None) -> list[str]:
    """Returns the names of the files in a checkpoint's directory."""
    if checkpoint is None:
        return []
    found = os.walk(checkpoint.path)
    return sorted(
        os.path.relpath(os.path.join(folder, name), checkpoint.path) for folder, _, names in found for name in names
    )


def _check_files(by_rank: list[list[str]]) -> None:
    """Raises TypeError, on every worker, if one has reported a file that rank 0 has not."""
    for rank, names in enumerate(by_rank):
        if lost := sorted(set(names) - set(by_rank[0])):
            raise TypeError(
                f"worker {rank} reports a checkpoint with {lost[0]}, which rank 0's lacks: only rank 0's is kept. "
                "For parts of all workers use rankzero.train.report(metrics, checkpoint=path, sharded=True)"
            )


def _has_group() -> bool:
    """Returns True if the workers have a process group, which `TorchTrainer` creates."""
    from torch import distributed

    return distributed.is_available() and distributed.is_initialized()


def get_checkpoint() -> Checkpoint | None:
    """Returns the last committed checkpoint of the run; None if there is none yet."""
    last = rt.get_checkpoint()
    return Checkpoint(last.id, last.to_directory) if last else None


def get_dataset_shard(dataset_name: str = "train") -> DatasetShard | TableShard:
    """Returns this worker's share of one of the trainer's ``datasets``.

    Raises:
        KeyError: the trainer was given no data set of this name.
    """
    from rankzero.compat.ray_train import dataset

    return dataset.shard(dataset_name)
