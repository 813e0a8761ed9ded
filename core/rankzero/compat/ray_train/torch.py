"""`TorchTrainer`, on a `rankzero.Launcher`, and functions for PyTorch under the names of ``ray.train.torch``."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import rankzero.train as rt
from rankzero.compat.ray_train import config
from rankzero.compat.ray_train.checkpoint import Result, result_of
from rankzero.compat.ray_train.config import TorchConfig, lookup, refuse
from rankzero.errors import InvalidJobError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    from rankzero.launcher import Launcher
    from rankzero.train import PreparedDataLoader

__all__ = ["TorchConfig", "TorchTrainer", "get_device", "prepare_data_loader", "prepare_model"]


class TorchTrainer:
    """Ray's ``TorchTrainer``: runs a training function on every worker.

    A trainer can replace a training function: ``launcher.run(trainer)``, an Airflow task and a Dagster asset accept it,
    and use its number of workers, restarts and checkpoints.

    Args:
        train_loop_per_worker: A function of no argument, or of the configuration.
        train_loop_config: The configuration; its `rankzero.ResultRef` values are opened in the workers.
        torch_config: Options of the process group, which some of Ray's guides call ``torch_backend``.
        scaling_config: Number of workers, and their resources.
        run_config: Name and storage of the run, restarts, checkpoints.
        datasets: Spark DataFrames or paths of tables by name, for `get_dataset_shard`.
        launcher: The engine, and options that Ray lacks. None: the active SparkSession, else this machine.

    Raises:
        InvalidJobError: a value is wrong, or an option does not exist here.

    Example:
        >>> from rankzero.compat.ray_train import ScalingConfig, TorchTrainer, train
        >>> def loop(config):
        ...     train.report({"loss": config["lr"] * train.get_context().get_world_size()})
        >>> trainer = TorchTrainer(loop, train_loop_config={"lr": 0.5}, scaling_config=ScalingConfig(num_workers=2))
        >>> trainer.fit().metrics
        {'loss': 1.0}
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        torch_config: TorchConfig | None = None,
        scaling_config: config.ScalingConfig | None = None,
        run_config: config.RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        torch_backend: TorchConfig | None = None,
        launcher: Launcher | None = None,
        **options: Any,
    ) -> None:
        refuse("TorchTrainer", options)
        if not callable(train_loop_per_worker):
            raise InvalidJobError(f"train_loop_per_worker is {train_loop_per_worker!r}; it must be a function")
        kinds = [parameter.kind for parameter in inspect.signature(train_loop_per_worker).parameters.values()]
        self._wants_config = any(kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds)
        self.train_loop_per_worker = train_loop_per_worker
        # Under this name core opens the references in it.
        self.launch_config = dict(train_loop_config or {})
        self.torch_config = torch_config or torch_backend or TorchConfig()
        self.scaling_config = scaling_config or config.ScalingConfig()
        self.run_config = run_config or config.RunConfig()
        self.datasets = dict(datasets or {})
        self._launcher = launcher

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for workers, without the data and what may hold credentials: launcher and environment.

        The number of restarts is left out, too: a training with another one is the same training.
        """
        run_config = replace(self.run_config, worker_runtime_env={}, failure_config=None)
        return {**vars(self), "_launcher": None, "datasets": {}, "run_config": run_config}

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchTrainer:
        """Returns a copy in this process, which keeps what `__getstate__` leaves out."""
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def fit(self) -> Result:
        """Trains, and returns the result. Raises TrainingFailedError, which describes the first cause."""
        from rankzero.compat.torch_distributor import active_session, engine_of_session
        from rankzero.launcher import Launcher, follow_run

        session = active_session()
        launcher = self._launcher or Launcher(engine=None if session is None else engine_of_session(session))
        value, handle = follow_run(launcher, self, (), {})
        return result_of(handle, value)

    def launch_options(self) -> dict[str, Any]:
        """Returns the options of `rankzero.Launcher` that this trainer sets, also for a launcher of the caller."""
        run, scaling = self.run_config, self.scaling_config
        failures = run.failure_config or config.FailureConfig()
        limits = {"max_restarts": failures.max_failures, "max_preemptions": failures.max_preemption_failures}
        given = {
            "num_processes": scaling.num_workers,
            "use_gpu": scaling.use_gpu,
            **{name: config.UNLIMITED if count < 0 else count for name, count in limits.items()},
            "checkpoints": (run.checkpoint_config or config.CheckpointConfig()).kept(),
            "restart_on": (BaseException,) if failures.max_failures else None,
            "dataset": self.datasets or None,
            "backend": self.torch_config.backend,
            "env": (run.worker_runtime_env or {}).get("env_vars"),
        }
        return {name: value for name, value in given.items() if value is not None}

    def launch_names(self) -> dict[str, Any]:
        """Returns the name and the store of the run, which a pipeline step replaces by its own."""
        given = {"run_id": self.run_config.name, "store": self.run_config.storage_path}
        return {name: value for name, value in given.items() if value}

    @property
    def resumes_by_name(self) -> bool:
        """Returns True if the run has a name: as in Ray, it resumes the run of that name, whatever has changed."""
        return self.run_config.name is not None

    def __call__(self) -> Any:
        """Creates the process group and calls the training function, in one worker."""
        device = get_device()
        # Accelerate would take every GPU of the machine for its own, and a worker without one for the only worker.
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)
        if device.type == "cpu":
            os.environ["ACCELERATE_USE_CPU"] = "true"
        rt.ensure_process_group(timedelta(seconds=self.torch_config.timeout_s))
        return self.train_loop_per_worker(*([self.launch_config] if self._wants_config else []))


def prepare_model(
    model: nn.Module,
    move_to_device: bool = True,
    parallel_strategy: Literal["ddp", "fsdp"] | None = "ddp",
    parallel_strategy_kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Prepares a model with `rankzero.train.prepare_model`; ``"fsdp"`` is FSDP2, and works on a CPU, too."""
    if move_to_device is not True:
        raise ValueError(f"move_to_device is {move_to_device!r}; a model lives on its worker's device, so leave it out")
    return rt.prepare_model(model, parallel_strategy, **(parallel_strategy_kwargs or {}))


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
) -> PreparedDataLoader:
    """Gives each worker its share of a loader's data, as Ray does; keeps its arguments, and sets epochs automatically.

    Every worker gets the same number of rows: the first ones are repeated, and the loader's ``drop_last`` then drops a
    batch that is not full. `rankzero.train.prepare_data_loader` describes the samplers, and raises the errors.

    Args:
        data_loader: The loader. An ``IterableDataset`` is left alone: it yields the rows of its worker by itself.
        add_dist_sampler: False keeps the loader's own sampler, which each worker draws with its own random numbers.
        move_to_device: Whether batches are moved to the worker's device.
        auto_transfer: Accepted for compatibility; a batch in pinned memory is always copied while training continues.
    """
    from torch.utils.data import IterableDataset

    is_shared = add_dist_sampler and not isinstance(getattr(data_loader, "dataset", None), IterableDataset)
    return rt.prepare_data_loader(data_loader, shard=is_shared, move=move_to_device, seed=0)


def get_device() -> torch.device:
    """Returns the device of this worker."""
    return rt.get_context().device


__getattr__ = lookup(__name__)
