"""Hugging Face's ``Trainer`` in the workers of a `TorchTrainer`, named as in ``ray.train.huggingface.transformers``."""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
from typing import Any

import rankzero.train as rt
from rankzero.compat.ray_train import train
from rankzero.compat.ray_train.dataset import Batches
from rankzero.compat.ray_train.names import lookup

__all__ = ["RayTrainReportCallback", "prepare_trainer"]

try:
    _transformers: Any = importlib.import_module("transformers")
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"rankzero.compat.ray_train.huggingface.transformers needs {error.name}: pip install transformers accelerate"
    ) from error


class RayTrainReportCallback(_transformers.TrainerCallback):  # type: ignore[misc]
    """Reports each checkpoint that Hugging Face's ``Trainer`` saves, with the latest value of each metric."""

    CHECKPOINT_NAME = "checkpoint"
    """Name of the folder of the ``Trainer``'s checkpoint in the directory of the reported one."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Reports the checkpoint that was just saved."""
        metrics = {name: value for log in state.log_history for name, value in log.items()}
        # Each worker writes files into one folder: all are complete behind this.
        rt.barrier()
        # Not the folder with the highest number, which another training may have left.
        saved = os.path.join(
            args.output_dir, f"{_transformers.trainer_utils.PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        )
        is_there = os.path.isdir(saved)
        with tempfile.TemporaryDirectory() as folder:
            if is_there:
                shutil.copytree(saved, os.path.join(folder, self.CHECKPOINT_NAME))
            train.report(metrics, checkpoint=train.Checkpoint.from_directory(folder) if is_there else None)


def prepare_trainer(trainer: Any) -> Any:
    """Returns the trainer, which may have batches of `get_dataset_shard` as ``train_dataset`` and ``eval_dataset``.

    Args:
        trainer: A ``Trainer`` of Hugging Face.
    """
    trainer.__class__ = type("PreparedTrainer", (_OfBatches, type(trainer)), {})
    return trainer


class _OfBatches:
    """The part of a trainer that takes whole batches of the worker."""

    train_dataset: Any
    eval_dataset: Any

    def get_train_dataloader(self) -> Any:
        """Returns a loader of the batches, or the one of Hugging Face for other data."""
        is_batches = isinstance(self.train_dataset, Batches)
        return _loader(self.train_dataset) if is_batches else super().get_train_dataloader()  # type: ignore[misc]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Returns a loader of the batches, or the one of Hugging Face for other data."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, str) and isinstance(self.eval_dataset, dict):
            data = self.eval_dataset[data]
        is_batches = isinstance(data, Batches)
        return _loader(data) if is_batches else super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]


def _loader(data: Batches) -> Any:
    """Returns a loader of a shard's batches."""
    from torch.utils.data import DataLoader, IterableDataset

    class OfBatches(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(data)

    return DataLoader(OfBatches(), batch_size=1, collate_fn=lambda batches: batches[0])


__getattr__ = lookup(__name__)
