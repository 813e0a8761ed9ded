"""Ray Train's interface on rankzero's launcher: a training script moves over by changing its imports.

    from ray import train                     ->  from rankzero.compat.ray_train import train
    from ray.train import report, RunConfig       from rankzero.compat.ray_train import report, RunConfig
    from ray.air import session, ScalingConfig    from rankzero.compat.ray_train import session, ScalingConfig
    from ray.train.torch import TorchTrainer      from rankzero.compat.ray_train.torch import TorchTrainer
    import ray.train.lightning                    import rankzero.compat.ray_train.lightning

This package only translates names and arguments. Runs start through `Launcher` only.
"""

from rankzero.compat.ray_train import collective, session, torch, train
from rankzero.compat.ray_train.config import TorchConfig
from rankzero.compat.ray_train.names import lookup
from rankzero.compat.ray_train.train import (
    TRAIN_DATASET_KEY,
    Checkpoint,
    CheckpointConfig,
    CheckpointConsistencyMode,
    CheckpointUploadMode,
    ControllerError,
    DataConfig,
    FailureConfig,
    NCCLHangError,
    PreemptionInfo,
    ReportedCheckpoint,
    ReportedCheckpointStatus,
    Result,
    RunConfig,
    ScalingConfig,
    TrainContext,
    TrainingFailedError,
    UserCallback,
    WorkerGroupError,
    get_all_reported_checkpoints,
    get_checkpoint,
    get_context,
    get_dataset_shard,
    get_preemption_info,
    report,
)
from rankzero.compat.ray_train.trainer import TorchTrainer

__all__ = [
    "TRAIN_DATASET_KEY",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointConsistencyMode",
    "CheckpointUploadMode",
    "ControllerError",
    "DataConfig",
    "FailureConfig",
    "NCCLHangError",
    "PreemptionInfo",
    "ReportedCheckpoint",
    "ReportedCheckpointStatus",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "TorchConfig",
    "TorchTrainer",
    "TrainContext",
    "TrainingFailedError",
    "UserCallback",
    "WorkerGroupError",
    "collective",
    "get_all_reported_checkpoints",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "get_preemption_info",
    "report",
    "session",
    "torch",
    "train",
]

__getattr__ = lookup(__name__, "huggingface", "lightning")
