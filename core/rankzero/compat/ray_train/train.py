"""Functions for training functions under the names of ``ray.train``."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import rankzero.train as rt
from rankzero.compat.ray_train import callback, collective, torch
from rankzero.compat.ray_train.callback import UserCallback
from rankzero.compat.ray_train.checkpoint import Checkpoint, Stored, resumed
from rankzero.compat.ray_train.config import CheckpointConfig, DataConfig, FailureConfig, RunConfig, ScalingConfig
from rankzero.compat.ray_train.names import INSTEAD, lookup
from rankzero.compat.ray_train.result import Result
from rankzero.errors import EngineError as ControllerError
from rankzero.errors import HangError as NCCLHangError
from rankzero.errors import RankZeroError as TrainingFailedError
from rankzero.errors import WorkerFailedError as WorkerGroupError
from rankzero.job import CheckpointConfig as KeptCheckpoints
from rankzero.run import checkpoints
from rankzero.run.directory import RunDirectory
from rankzero.train.context import await_checkpoint, current, follow_checkpoint
from rankzero.values.plain import scalar

if TYPE_CHECKING:
    from rankzero.compat.ray_train.dataset import DatasetShard, TableShard

__all__ = [
    "TRAIN_DATASET_KEY", "Checkpoint", "CheckpointConfig", "CheckpointConsistencyMode", "CheckpointUploadMode",
    "ControllerError", "DataConfig", "FailureConfig", "NCCLHangError", "ReportedCheckpoint",
    "ReportedCheckpointStatus", "Result", "RunConfig", "ScalingConfig", "TrainContext", "TrainingFailedError",
    "UserCallback", "WorkerGroupError", "collective", "get_all_reported_checkpoints", "get_checkpoint", "get_context",
    "get_dataset_shard", "get_preemption_info", "report", "torch",
]  # fmt: skip

TRAIN_DATASET_KEY = "train"
"""Name of the data set that `get_dataset_shard` returns by default."""


class CheckpointUploadMode(Enum):
    """Ray's modes of an upload. Here all are one: `report` copies the files, which are stored while training continues.

    ``ASYNC`` also deletes the local directory once it is copied.
    """

    ASYNC = "ASYNC"
    SYNC = "SYNC"
    NO_UPLOAD = "NO_UPLOAD"


class CheckpointConsistencyMode(Enum):
    """Ray's modes of `get_all_reported_checkpoints`. Here both mean a committed checkpoint."""

    COMMITTED = "COMMITTED"
    VALIDATED = "VALIDATED"


class ReportedCheckpointStatus(Enum):
    """State of a reported checkpoint. Here every one is ``COMMITTED``, since validation belongs to the user."""

    COMMITTED = "COMMITTED"
    PENDING_VALIDATION = "PENDING_VALIDATION"
    VALIDATED = "VALIDATED"
    VALIDATION_TIMEOUT = "VALIDATION_TIMEOUT"
    VALIDATION_FAILED = "VALIDATION_FAILED"


@dataclass(frozen=True)
class ReportedCheckpoint:
    """A committed checkpoint of the run.

    Attributes:
        checkpoint: The checkpoint.
        metrics: Metrics that rank 0 reported with it.
        status: Its state.
    """

    checkpoint: Checkpoint
    metrics: dict[str, Any]
    status: ReportedCheckpointStatus = ReportedCheckpointStatus.COMMITTED


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

    def __getattr__(self, name: str) -> Any:
        advice = f": {INSTEAD[name]}" if name in INSTEAD else ""
        raise AttributeError(f"the context has no {name}{advice}")


def get_context() -> TrainContext:
    """Returns the context of this worker."""
    return TrainContext()


def report(
    metrics: Mapping[str, Any],
    checkpoint: Checkpoint | None = None,
    checkpoint_dir_name: str | None = None,
    checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
    delete_local_checkpoint_after_upload: bool | None = None,
    checkpoint_upload_fn: Callable[[Checkpoint, str], Checkpoint] | None = None,
    validation: object = False,
) -> None:
    """Reports metrics, and optionally a checkpoint. Like Ray's, it is a barrier: each worker must call it.

    A worker that raises after a report therefore loses no checkpoint of that report: those of all workers have been
    copied, and are written before the attempt ends, within ``stop_grace``. A worker that is killed may lose its last
    one, and no earlier one.
    If another worker than rank 0 gives a directory with files that rank 0's lacks, the checkpoint consists of the files
    of all workers; else it is rank 0's.

    Args:
        metrics: Name to number or string. Other values, such as None or lists, reach callbacks only.
        checkpoint: The checkpoint, usually from `Checkpoint.from_directory`; its directory may be deleted after this
            call.
        checkpoint_dir_name: Accepted for compatibility; the run names its checkpoints.
        checkpoint_upload_mode: See `CheckpointUploadMode`.
        delete_local_checkpoint_after_upload: Whether to delete the local directory; None: in the mode ``ASYNC``.
        checkpoint_upload_fn: Called with the checkpoint and its name; the one that it returns is reported.
        validation: Refused.

    Raises:
        TypeError: ``checkpoint`` is not a `Checkpoint`.
        NotImplementedError: ``validation`` was given.
        ResultError: the checkpoint cannot be written.
        ValueError: a checkpoint of several workers after one of rank 0 alone.
    """
    if validation:
        raise NotImplementedError(f"report(validation=...) is not supported: {INSTEAD['ValidationConfig']}")
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        raise TypeError(f"checkpoint is a {type(checkpoint).__name__}; give Checkpoint.from_directory(path)")
    if checkpoint is not None and checkpoint_upload_fn is not None:
        checkpoint = checkpoint_upload_fn(checkpoint, checkpoint_dir_name or f"checkpoint_{current().checkpoints:06d}")
    kept = _scalars(metrics)
    with contextlib.ExitStack() as stack:
        directory = None if checkpoint is None else stack.enter_context(checkpoint.as_directory())
        has_callbacks = bool(callback.installed)
        everyone = _gather((_files(directory), dict(metrics) if has_callbacks else None))
        by_rank = [files for files, _ in everyone]
        is_any = any(files is not None for files in by_rank)
        if is_any and _is_sharded(by_rank):
            # A worker that gives none, or the directory of a lower rank, has an empty part.
            empty = tempfile.TemporaryDirectory(dir=os.environ.get("RANKZERO_SCRATCH"))
            places, here = [files and files[0] for files in by_rank], rt.get_context().rank % len(by_rank)
            part = None if places.index(places[here]) < here else directory
            rt.report(kept, checkpoint=part or stack.enter_context(empty), sharded=True)
        else:
            is_first = rt.get_context().rank == 0
            rt.report(kept, checkpoint=directory if is_first else None)
            if is_any and not is_first:
                follow_checkpoint()
        if is_any:
            # No worker returns before the checkpoints of all are copied.
            _gather(None)
        deletes = delete_local_checkpoint_after_upload
        if directory and (checkpoint_upload_mode is CheckpointUploadMode.ASYNC if deletes is None else deletes):
            shutil.rmtree(directory, ignore_errors=True)
    if has_callbacks:
        reported = get_checkpoint() if is_any else None
        for each in callback.installed if rt.get_context().rank == 0 else ():
            each.after_report(rt.get_context(), [row or {} for _, row in everyone], reported)
        # A worker that raises behind the report would end rank 0 in its callbacks.
        _gather(None)


_print_once = functools.cache(print)


def _scalars(metrics: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in metrics.items():
        try:
            kept[name] = scalar(name, value)
        except TypeError as error:
            _print_once(f"rankzero: the reports of this worker leave out a metric: {error}")
    return kept


def _gather(value: Any) -> list[Any]:
    """Returns the values of all workers by rank; without a process group, which `TorchTrainer` creates, this one's."""
    from torch import distributed

    if rt.get_context().world_size > 1 and distributed.is_available() and distributed.is_initialized():
        return rt.all_gather_object(value)
    return [value]


def _files(directory: str | None) -> tuple[object, list[str]] | None:
    """Returns the identity of a checkpoint's directory, and the names of its files; None without one."""
    if directory is None:
        return None
    paths = [os.path.join(folder, name) for folder, _, names in os.walk(directory) for name in names]
    found = os.stat(directory)
    return (socket.gethostname(), found.st_dev, found.st_ino), [os.path.relpath(path, directory) for path in paths]


def _is_sharded(by_rank: list[tuple[object, list[str]] | None]) -> bool:
    """Returns True if the checkpoint of one worker lacks files of another, or an earlier one of this attempt did."""
    writer = current().writer
    place, lead = by_rank[0] or (None, [])
    # Workers of a host may report one directory, such as the temporary one, whose files change meanwhile.
    others = [files for at, files in filter(None, by_rank) if at != place]
    return bool(writer and writer.is_sharded) or any(set(files) - set(lead) for files in others)


def get_checkpoint() -> Checkpoint | None:
    """Returns the checkpoint that was reported last, once it is committed; None if there is none yet.

    A new attempt gets the last one of the attempts before, or the trainer's ``resume_from_checkpoint``.
    """
    await_checkpoint()
    last = rt.get_checkpoint()
    if last is None:
        return resumed[0] if resumed else None
    return Checkpoint.of_run(Stored(_run_directory() or "", last.id, last))


def _run_directory() -> str | None:
    session = current()
    return session.parts.run_directory if session.parts else session.context.storage_path


def get_all_reported_checkpoints(
    consistency_mode: CheckpointConsistencyMode = CheckpointConsistencyMode.VALIDATED, timeout_s: float | None = None
) -> list[ReportedCheckpoint]:
    """Returns the checkpoints of the run that are kept, oldest first, once the last reported one is committed.

    The arguments are accepted for compatibility. Raises RuntimeError if this host cannot read the run directory.
    """
    await_checkpoint()
    directory = _run_directory()
    if directory is None:
        return []
    try:
        run = RunDirectory(directory)
        found = checkpoints.list_committed(run, run.job().fresh_since)
        # The checkpoint that an attempt started from is on the disk as long as it runs.
        removed = checkpoints.to_remove(found, KeptCheckpoints(**run.job().checkpoints))
    except Exception as error:
        raise RuntimeError(f"this host cannot list the checkpoints in {directory}: {error}") from error
    kept = (each for each in found if each not in removed)
    return [ReportedCheckpoint(Checkpoint.of_run(Stored(directory, each.id)), each.metrics) for each in kept]


def get_preemption_info() -> None:
    """Returns None: clusters give no notice. A preempted worker restarts from the last checkpoint."""
    return None


def get_dataset_shard(dataset_name: str = TRAIN_DATASET_KEY) -> DatasetShard | TableShard:
    """Returns this worker's share of one of the trainer's ``datasets``.

    Raises:
        KeyError: the trainer was given no data set of this name.
    """
    from rankzero.compat.ray_train import dataset

    return dataset.shard(dataset_name)


__getattr__ = lookup(__name__, "huggingface", "lightning")
