"""Every public name of Ray Train 2.40 and 2.60, by their ``__all__`` and pages, works or raises the page's error."""

import pytest

from rankzero.compat.ray_train.config import ABSENT, UnsupportedError

HERE = "rankzero.compat.ray_train"

NAMES = {
    "": "AcquiredResources BackendConfig BaseTrainer Checkpoint CheckpointConfig CheckpointConsistencyMode "
    "CheckpointUploadMode ControllerError DataBatchType DataConfig DataParallelTrainer DatasetConfig FailureConfig "
    "LoggingConfig NCCLHangError PreemptionError PreemptionInfo ReportedCheckpoint ReportedCheckpointStatus "
    "ResourceRequest Result RunConfig ScalingConfig SyncConfig TRAIN_DATASET_KEY TrainContext TrainingFailedError "
    "TrainingIterator UserCallback ValidationConfig ValidationFn ValidationTaskConfig WorkerGroupError air backend "
    "base_trainer collective data data_parallel_trainer get_all_reported_checkpoints get_checkpoint get_context "
    "get_dataset_shard get_preemption_info horovod init integrations jax lightgbm report runtime_env session shutdown "
    "tensorflow torch train tune v2 xgboost",
    ".torch": "TorchCheckpoint TorchConfig TorchDetectionPredictor TorchPredictor TorchTrainer accelerate backward "
    "enable_reproducibility get_device get_devices prepare_data_loader prepare_model prepare_optimizer",
}
"""Public names of both versions of Ray, by the module here."""


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in NAMES for name in NAMES[module].split()])
def test_a_name_of_ray_works_or_raises_the_error(module: str, name: str) -> None:
    line = f"from {HERE}{module} import {name}"
    if name not in ABSENT:
        exec(line, {})
        return
    attribute = f"import {HERE}{module or '.train'} as module; module.{name}"
    as_module = () if module else (f"import {HERE}.{name}", f"from {HERE}.{name} import Anything")
    for refused in (line, attribute, *as_module):
        with pytest.raises(UnsupportedError, match=f"has no {name}: see docs/migrate.md#ray-train"):
            exec(refused, {})
