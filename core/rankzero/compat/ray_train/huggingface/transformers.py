"""Hugging Face's ``Trainer`` in the workers of a `TorchTrainer`, named as in ``ray.train.huggingface.transformers``."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import rankzero.train as rt
from rankzero.compat.ray_train import train
from rankzero.compat.ray_train.config import lookup

__all__ = ["RayTrainReportCallback", "prepare_trainer"]

_transformers: Any = importlib.import_module("transformers")


class RayTrainReportCallback(_transformers.TrainerCallback):  # type: ignore[misc]
    """Reports each checkpoint that the ``Trainer`` saves, as a folder ``CHECKPOINT_NAME``, with the latest metrics."""

    CHECKPOINT_NAME = "checkpoint"

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Reports the checkpoint that was just saved."""
        metrics = {name: value for log in state.log_history for name, value in log.items()}
        # Not the folder with the highest number, which another training may have left.
        name = f"{_transformers.trainer_utils.PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        saved = os.path.abspath(os.path.join(args.output_dir, name))
        # Each worker writes files into this folder of its host: all are complete behind this.
        rt.barrier()
        context = rt.get_context()
        claim = f"{saved}.{context.run_id}-{context.attempt}"
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as claimed:
            # One worker of each host reports what is there; of one task rank 0.
            if context.local_rank == 0 and os.path.isdir(saved):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(claim)
                    claimed.callback(os.rmdir, claim)
                    shutil.copytree(saved, os.path.join(folder, self.CHECKPOINT_NAME))
            train.report(metrics, train.Checkpoint.from_directory(folder), sharded=context.num_nodes > 1)


def prepare_trainer(trainer: Any) -> Any:
    """Returns the trainer, which may have batches of `get_dataset_shard` as ``train_dataset`` and ``eval_dataset``."""
    trainer.__class__ = type("PreparedTrainer", (_OfBatches, type(trainer)), {})
    return trainer


class _OfBatches:
    """The part of a trainer that takes whole batches of the worker, and leaves other data to Hugging Face."""

    train_dataset: Any
    eval_dataset: Any

    def get_train_dataloader(self) -> Any:
        """Returns a loader of the batches to train on."""
        return _loader(self.train_dataset, super().get_train_dataloader)  # type: ignore[misc]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Returns a loader of the batches to evaluate."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        return _loader(data, lambda: super(_OfBatches, self).get_eval_dataloader(eval_dataset))  # type: ignore[misc]


def _loader(data: Any, other: Callable[[], Any]) -> Any:
    """Returns a loader of a shard's batches; for other data what ``other`` returns."""
    from torch.utils.data import DataLoader, IterableDataset

    class OfBatches(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(data)

    if not isinstance(data, train.Batches):
        return other()
    return DataLoader(OfBatches(), batch_size=1, collate_fn=lambda batches: batches[0])


__getattr__ = lookup(__name__)
