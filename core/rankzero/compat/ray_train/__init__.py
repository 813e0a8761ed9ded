"""Ray Train's interface on rankzero's launcher: a training script moves over by changing its imports.

    from ray import train                     ->  from rankzero.compat.ray_train import train
    from ray.train import report, RunConfig       from rankzero.compat.ray_train import report, RunConfig
    from ray.air import session, ScalingConfig    from rankzero.compat.ray_train import session, ScalingConfig
    from ray.train.torch import TorchTrainer      from rankzero.compat.ray_train.torch import TorchTrainer

This package only translates names and arguments. Runs start through `Launcher` only.
"""

from rankzero.compat.ray_train import collective, session, torch, train
from rankzero.compat.ray_train.configs import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, TorchConfig
from rankzero.compat.ray_train.result import Checkpoint, Result
from rankzero.compat.ray_train.train import (
    TrainContext,
    TrainingFailedError,
    get_checkpoint,
    get_context,
    get_dataset_shard,
    report,
)
from rankzero.compat.ray_train.trainer import TorchTrainer

__all__ = [
    "Checkpoint",
    "CheckpointConfig",
    "FailureConfig",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "TorchConfig",
    "TorchTrainer",
    "TrainContext",
    "TrainingFailedError",
    "collective",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "report",
    "session",
    "torch",
    "train",
]
