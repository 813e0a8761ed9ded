"""Lightning's ``Trainer`` in the workers of a `TorchTrainer`, under the names of ``ray.train.lightning``."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
from typing import Any

import rankzero.train as rt
from rankzero.compat.ray_train import train
from rankzero.compat.ray_train.config import lookup

__all__ = ["RayDDPStrategy", "RayDeepSpeedStrategy", "RayFSDPStrategy", "RayLightningEnvironment",
           "RayTrainReportCallback", "prepare_trainer"]  # fmt: skip

_names = [name for name in ("lightning.pytorch", "pytorch_lightning") if name in sys.modules]
# The one that the user has imported, since their classes differ, else the one that is installed.
_names.append("lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning")
_pl: Any = importlib.import_module(_names[0])
_strategies: Any = importlib.import_module(f"{_pl.__name__}.strategies")
_environments: Any = importlib.import_module(f"{_pl.__name__}.plugins.environments")


class _InWorker:
    """The part of a strategy that knows the worker, in whose process group it trains."""

    @property
    def root_device(self) -> Any:
        """Returns the device of the worker."""
        return rt.get_context().device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Returns the share of the worker for a distributed sampler."""
        return {"num_replicas": rt.get_context().world_size, "rank": rt.get_context().rank}


class RayDDPStrategy(_InWorker, _strategies.DDPStrategy):  # type: ignore[misc]
    """Lightning's ``DDPStrategy``; the trainer's ``TorchConfig`` configures its process group."""


class RayFSDPStrategy(_InWorker, _strategies.FSDPStrategy):  # type: ignore[misc]
    """Lightning's ``FSDPStrategy``. It needs GPUs."""


class RayDeepSpeedStrategy(_InWorker, _strategies.DeepSpeedStrategy):  # type: ignore[misc]
    """Lightning's ``DeepSpeedStrategy``. It needs DeepSpeed and GPUs."""


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
    """Returns the ``Trainer`` of Lightning after a check.

    Raises RuntimeError if its strategy or environment would not train in the process group of the workers.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if not isinstance(trainer.strategy, _InWorker):
        wrong, right = trainer.strategy, "strategy=RayDDPStrategy(), RayFSDPStrategy() or RayDeepSpeedStrategy()"
    elif environment and not isinstance(environment, RayLightningEnvironment):
        wrong, right = environment, "plugins=[RayLightningEnvironment()]"
    else:
        return trainer
    raise RuntimeError(f"the trainer has a {type(wrong).__name__}; give it {right}")


class RayTrainReportCallback(_pl.Callback):  # type: ignore[misc]
    """Reports the metrics and a checkpoint, with a file ``CHECKPOINT_NAME``, at the end of each training epoch."""

    CHECKPOINT_NAME = "checkpoint.ckpt"

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Saves a checkpoint and reports it with the metrics, the epoch and the step."""
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        metrics |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        is_first, is_sharded = rt.get_context().rank == 0, rt.get_context().num_nodes > 1
        # Strategies with a part of each worker write below rank 0's path on every host. The worker that creates this
        # path on its host reports what is there.
        made = folder = rt.broadcast_object(tempfile.mkdtemp() if is_first else "")
        while not os.path.exists(parent := os.path.dirname(made)):
            made = parent
        with contextlib.suppress(FileExistsError):
            os.makedirs(folder, 0o700)
            is_first = True
        try:
            trainer.save_checkpoint(os.path.join(folder, self.CHECKPOINT_NAME), weights_only=False)
            with tempfile.TemporaryDirectory() as empty:
                checkpoint = train.Checkpoint.from_directory(folder if is_first else empty)
                train.report(metrics, checkpoint, sharded=is_sharded)
        finally:
            shutil.rmtree(made, ignore_errors=True)


__getattr__ = lookup(__name__)
