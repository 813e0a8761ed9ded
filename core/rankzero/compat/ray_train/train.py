"""Functions for training functions under the names of ``ray.train`` and ``ray.air.session``."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import rankzero.train as rt
from rankzero.compat.ray_train import config
from rankzero.compat.ray_train.checkpoint import Checkpoint, Result, StoredCheckpoint
from rankzero.compat.ray_train.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from rankzero.errors import RankZeroError as TrainingFailedError
from rankzero.train.context import await_checkpoint, current, scalar

if TYPE_CHECKING:
    import torch

__all__ = [
    "Checkpoint", "CheckpointConfig", "FailureConfig", "Result", "RunConfig", "ScalingConfig", "TrainContext",
    "TrainingFailedError", "get_checkpoint", "get_context", "get_dataset_shard", "report",
]  # fmt: skip


def report(
    metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None, *, sharded: bool = False, **options: Any
) -> None:
    """Reports metrics, and optionally a checkpoint. Like Ray's, it is a barrier: each worker must call it.

    A worker that raises after a report therefore loses no checkpoint of that report: it has been copied, and is written
    before the attempt ends, within ``stop_grace``. A worker that is killed may lose its last one, and no earlier one.

    Args:
        metrics: Name to number or string. Other values, such as None or lists, are left out with a line in the log.
        checkpoint: The checkpoint, usually from `Checkpoint.from_directory`; its directory may be deleted after this
            call. Rank 0's is kept.
        sharded: Whether the checkpoint consists of the directories of all workers. Of files with one name, the one of
            the lowest rank is kept.
        options: Options of Ray that do not exist here.

    Raises:
        TypeError: ``checkpoint`` is not a `Checkpoint`.
        UnsupportedError: another option was given.
        ResultError: the checkpoint cannot be written.
        ValueError: rank 0 gave no checkpoint, or lacks a file of another; with ``sharded``: not every worker gave one.
    """
    config.refuse("report", options)
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        raise TypeError(f"checkpoint is a {type(checkpoint).__name__}; give Checkpoint.from_directory(path)")
    with contextlib.nullcontext() if checkpoint is None else checkpoint.as_directory() as directory:
        names = set(os.listdir(directory)) if directory else None
        rt.report(_scalars(metrics), checkpoint=directory, sharded=sharded)
    # No worker returns before the checkpoints of all are copied.
    found = rt.all_gather_object(names)
    if not sharded and found[0] is not None and (lost := set().union(*filter(None, found)) - found[0]):
        raise ValueError(f"rank 0's checkpoint lacks {', '.join(sorted(lost))} of other ranks: report sharded=True")
    gave = [each is not None for each in found]
    if any(gave) and not (all(gave) if sharded else gave[0]):
        raise ValueError(
            f"rank {gave.index(True)} reported a checkpoint, and rank {gave.index(False)} none: report one on rank 0, "
            "or one on every rank with sharded=True"
        )
    if gave[0] and checkpoint is None and (writer := current().writer):
        writer.follow()


_print_once = functools.cache(print)


def _scalars(metrics: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in metrics.items():
        try:
            kept[name] = scalar(name, value)
        except TypeError as error:
            _print_once(f"rankzero: the reports of this worker leave out a metric: {error}")
    return kept


def get_checkpoint() -> Checkpoint | None:
    """Returns the checkpoint that was reported last, once it is committed; None if there is none yet.

    A new attempt gets the last one of the attempts before it, and so does a run with the name of an earlier one.
    """
    await_checkpoint()
    last, session = rt.get_checkpoint(), current()
    if last is None:
        return None
    place = session.parts.place(last.id) if session.parts else session.context.storage_path
    return StoredCheckpoint(place or "", last.id, last)


class DatasetShard:
    """A worker's share of the rows of one of the trainer's ``datasets``."""

    def __init__(self, share: rt.DatasetShard) -> None:
        self._share = share

    def iter_torch_batches(
        self,
        *,
        prefetch_batches: int = 1,
        batch_size: int | None = 256,
        dtypes: Any = None,
        device: torch.device | str = "auto",
        collate_fn: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        pin_memory: bool = False,
    ) -> Batches:
        """Returns batches, dicts of tensors by column, the same number on every worker. Each iteration is a new epoch.

        Args:
            prefetch_batches: 0 reads nothing in advance.
            batch_size: Rows of a batch; None for one batch of all rows.
            dtypes: Type of all tensors, or a dict of the types by column.
            device: Device of the tensors; ``"auto"`` for this worker's.
            collate_fn: Makes a batch of a dict of numpy arrays by column.
            drop_last: Whether to leave out the last batch if it is smaller.
            local_shuffle_buffer_size: Any value except None shuffles all rows, over all workers.
            local_shuffle_seed: Seed of the order.
            pin_memory: Accepted for compatibility.
        """

        def make(columns: dict[str, Any]) -> Any:
            if collate_fn is not None:
                import numpy

                return collate_fn({name: numpy.asarray(column) for name, column in columns.items()})
            by_column = dtypes if isinstance(dtypes, Mapping) else dict.fromkeys(columns if dtypes else (), dtypes)
            # Texts are lists.
            tensors = (name for name in by_column if hasattr(columns[name], "to"))
            return columns | {name: columns[name].to(by_column[name]) for name in tensors}

        order: Any = {"shuffle": local_shuffle_buffer_size is not None, "seed": local_shuffle_seed or 0}
        place, ahead, size = None if device == "auto" else device, min(prefetch_batches, 1), batch_size or 1 << 40
        reading: Any = {"collate": make, "device": place, "prefetch": ahead, "drop_last": drop_last}
        return Batches(functools.partial(self._share.iter_batches, size, **order, **reading))


class Batches:
    """The batches of a worker's share, of which ``epoch`` returns those of the next epoch."""

    def __init__(self, epoch: Callable[[], Iterator[Any]]) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return self._epoch()


def get_dataset_shard(dataset_name: str = "train") -> DatasetShard:
    """Returns this worker's share of a data set of the trainer. Raises InvalidJobError if it has none of this name."""
    return DatasetShard(rt.get_dataset_shard(dataset_name))


def _field(name: str) -> Callable[[object], Any]:
    return lambda self: getattr(rt.get_context(), name)


class TrainContext:
    """The ranks and the run of this worker: methods with Ray's names for fields of `rankzero.train.TrainContext`.

    It also has the functions of ``ray.air.session``, which scripts before Ray 2.7 use.
    """

    get_world_size = _field("world_size")
    get_world_rank = _field("rank")
    get_local_rank = _field("local_rank")
    get_local_world_size = _field("local_world_size")
    get_node_rank = _field("node_rank")
    get_experiment_name = _field("run_id")
    report = staticmethod(report)
    get_checkpoint = staticmethod(get_checkpoint)
    get_dataset_shard = staticmethod(get_dataset_shard)


session = TrainContext()


def get_context() -> TrainContext:
    """Returns the context of this worker."""
    return session


__getattr__ = config.lookup(__name__, "huggingface", "lightning", "torch")
