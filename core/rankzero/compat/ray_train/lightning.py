"""Lightning's ``Trainer`` in the workers of a `TorchTrainer`, under the names of ``ray.train.lightning``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
from typing import Any

import rankzero.train as rt
from rankzero.compat.ray_train import train
from rankzero.compat.ray_train.names import INSTEAD, lookup

__all__ = [
    "RayDDPStrategy", "RayDeepSpeedStrategy", "RayFSDPStrategy", "RayLightningEnvironment", "RayTrainReportCallback",
    "prepare_trainer",
]  # fmt: skip


def _package() -> str:
    """Returns the name of Lightning: the one that the user has imported, since their classes differ, or has installed.

    Raises:
        ModuleNotFoundError: Lightning is not installed.
    """
    names = ("lightning.pytorch", "pytorch_lightning")
    found = [name for name in names if name in sys.modules or importlib.util.find_spec(name.partition(".")[0])]
    if not found:
        raise ModuleNotFoundError("rankzero.compat.ray_train.lightning needs Lightning: pip install lightning")
    return min(found, key=lambda name: name not in sys.modules)


_pl: Any = importlib.import_module(_package())
_strategies: Any = importlib.import_module(f"{_pl.__name__}.strategies")
_environments: Any = importlib.import_module(f"{_pl.__name__}.plugins.environments")


class _InWorker:
    """The part of a strategy that knows the worker."""

    @property
    def root_device(self) -> Any:
        """Returns the device of the worker."""
        return rt.get_context().device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Returns the share of the worker for a distributed sampler."""
        return {"num_replicas": rt.get_context().world_size, "rank": rt.get_context().rank}


class RayDDPStrategy(_InWorker, _strategies.DDPStrategy):  # type: ignore[misc]
    """Lightning's ``DDPStrategy`` in the process group of a `TorchTrainer`, whose ``TorchConfig`` configures it."""


class RayFSDPStrategy(_InWorker, _strategies.FSDPStrategy):  # type: ignore[misc]
    """Lightning's ``FSDPStrategy`` in the process group of a `TorchTrainer`. It needs GPUs."""


class RayDeepSpeedStrategy(_InWorker, _strategies.DeepSpeedStrategy):  # type: ignore[misc]
    """Lightning's ``DeepSpeedStrategy`` in the process group of a `TorchTrainer`. It needs DeepSpeed and GPUs."""


class RayLightningEnvironment(_environments.LightningEnvironment):  # type: ignore[misc]
    """Tells Lightning the ranks of the worker. The workers are started already."""

    world_size = train.TrainContext.get_world_size
    global_rank = train.TrainContext.get_world_rank
    local_rank = train.TrainContext.get_local_rank
    node_rank = train.TrainContext.get_node_rank

    def set_world_size(self, size: int) -> None:
        """Does nothing: the run decides."""

    set_global_rank = set_world_size

    def teardown(self) -> None:
        """Does nothing: Lightning would delete WORLD_SIZE."""


def prepare_trainer(trainer: Any) -> Any:
    """Returns the trainer after a check of its strategy and environment.

    Args:
        trainer: A ``Trainer`` of Lightning.

    Raises:
        RuntimeError: the trainer would not train in the process group of the workers.
    """
    known = (RayDDPStrategy, RayFSDPStrategy, RayDeepSpeedStrategy)
    if not isinstance(trainer.strategy, known):
        names = ", ".join(strategy.__name__ for strategy in known)
        raise RuntimeError(f"the trainer's strategy is a {type(trainer.strategy).__name__}; give one of {names}")
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if environment and not isinstance(environment, RayLightningEnvironment):
        raise RuntimeError(
            f"the trainer's environment is a {type(environment).__name__}; give plugins=[RayLightningEnvironment()]"
        )
    return trainer


class RayTrainReportCallback(_pl.Callback):  # type: ignore[misc]
    """Reports the metrics and a checkpoint at the end of each training epoch.

    Args:
        checkpoint_upload_mode: As for `report`; None for ``SYNC``.
        validation: Refused, with a NotImplementedError.
    """

    CHECKPOINT_NAME = "checkpoint.ckpt"
    """Name of Lightning's checkpoint in the directory of the reported one."""

    def __init__(
        self, checkpoint_upload_mode: train.CheckpointUploadMode | None = None, validation: object = False
    ) -> None:
        super().__init__()
        if validation:
            raise NotImplementedError(f"validation is not supported: {INSTEAD['ValidationConfig']}")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Saves a checkpoint and reports it with the metrics, the epoch and the step."""
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        metrics |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        # Strategies with a part of each worker write below rank 0's path on every host.
        own = tempfile.mkdtemp() if rt.get_context().rank == 0 else ""
        made = folder = rt.broadcast_object(own)
        while not os.path.exists(parent := os.path.dirname(made)):
            made = parent
        os.makedirs(folder, 0o700, exist_ok=True)
        try:
            trainer.save_checkpoint(os.path.join(folder, self.CHECKPOINT_NAME), weights_only=False)
            train.report(metrics, checkpoint=train.Checkpoint.from_directory(folder))
        finally:
            shutil.rmtree(made, ignore_errors=True)


__getattr__ = lookup(__name__)
