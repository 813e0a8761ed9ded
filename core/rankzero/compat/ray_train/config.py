"""Ray's configuration classes, and the error for its names and options that are not here."""

from __future__ import annotations

import importlib.abc
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rankzero.errors import InvalidJobError
from rankzero.job import CheckpointConfig as KeptCheckpoints

UNLIMITED = 1_000_000
"""Number of restarts for Ray's ``-1`` (no limit)."""

_NAMES = (
    "AcquiredResources BackendConfig BaseTrainer CheckpointConsistencyMode CheckpointUploadMode ControllerError "
    "DataBatchType DataConfig DataParallelTrainer DatasetConfig LightningConfigBuilder LightningTrainer LoggingConfig "
    "NCCLHangError PreemptionError PreemptionInfo ReportedCheckpoint ReportedCheckpointStatus ResourceRequest "
    "SyncConfig TRAIN_DATASET_KEY TorchCheckpoint TorchDetectionPredictor TorchPredictor TrainingIterator "
    "TransformersTrainer UserCallback ValidationConfig ValidationFn ValidationTaskConfig WorkerGroupError accelerate "
    "air backend backward base_trainer collective data data_parallel_trainer enable_reproducibility "
    "get_all_reported_checkpoints get_devices get_metadata get_preemption_info get_run_id get_storage get_trial_dir "
    "get_trial_id get_trial_name get_trial_resources horovod init integrations jax lightgbm prepare_optimizer "
    "runtime_env shutdown tensorflow tune v2 xgboost"
)
ABSENT = frozenset(_NAMES.split())
"""Public names of Ray 2.40 and 2.60 for which docs/migrate.md#ray-train says what to use instead."""


class UnsupportedError(InvalidJobError, ImportError):
    """Raised for a name, or an option, of Ray Train that does not exist here."""


def unsupported(what: str) -> UnsupportedError:
    """Returns the error for a name or an option, which names the page."""
    return UnsupportedError(f"rankzero.compat.ray_train has no {what}: see docs/migrate.md#ray-train")


class _Finder(importlib.abc.MetaPathFinder):
    """The last importer: the import of a module that this package lacks calls no ``__getattr__``."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raises UnsupportedError for an absent module below this package."""
        if name.startswith(__package__) and name.rpartition(".")[2] in ABSENT:
            raise unsupported(name.rpartition(".")[2])


sys.meta_path.append(_Finder())


def lookup(module: str, *submodules: str) -> Callable[[str], Any]:
    """Returns a module's ``__getattr__``: imports these modules of this package, and refuses names of Ray."""

    def find(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{__package__}.{name}")
        if name in ABSENT:
            raise unsupported(name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find


def refuse(call: str, options: Iterable[str]) -> None:
    """Raises UnsupportedError if a call was given options that do not exist here."""
    if names := ", ".join(sorted(options)):
        raise unsupported(f"{call}({names})")


class _Options(type):
    """The class of the configuration classes. Raises UnsupportedError for a field that is not here."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        refuse(cls.__name__, options.keys() - {each.name for each in fields(cls)})  # type: ignore[arg-type]
        return super().__call__(*args, **options)


@dataclass(frozen=True)
class ScalingConfig(metaclass=_Options):
    """The number of workers, and their resources.

    Attributes:
        num_workers: World size; ``(min, max)`` is elastic.
        use_gpu: Whether each worker gets a GPU.
        resources_per_worker: Checked only: ``use_gpu`` decides about ``"GPU"``, the cluster about everything else.
        placement_strategy: Accepted for compatibility; the cluster decides where tasks run.
    """

    num_workers: int | tuple[int, int] = 1
    use_gpu: bool = False
    resources_per_worker: Mapping[str, float] | None = None
    placement_strategy: str = "PACK"

    def __post_init__(self) -> None:
        if (gpus := (self.resources_per_worker or {}).get("GPU", self.use_gpu)) != self.use_gpu:
            raise InvalidJobError(f"use_gpu is {self.use_gpu}, but resources_per_worker has GPU={gpus}: leave GPU out")


@dataclass(frozen=True)
class TorchConfig(metaclass=_Options):
    """Options of the process group, which is created before the training function is called.

    Attributes:
        backend: ``"nccl"`` or ``"gloo"``; None: nccl with GPUs, else gloo.
        timeout_s: Timeout of a collective in seconds.
    """

    backend: str | None = None
    timeout_s: float = 1800


@dataclass(frozen=True)
class FailureConfig(metaclass=_Options):
    """Limits of new attempts after failures.

    Attributes:
        max_failures: New attempts, from the last checkpoint, after any failure of a worker; -1 for no limit.
        max_preemption_failures: Likewise after the cluster has preempted a worker.
    """

    max_failures: int = 0
    max_preemption_failures: int = -1


@dataclass(frozen=True)
class CheckpointConfig(metaclass=_Options):
    """Options that decide which checkpoints are kept.

    Attributes:
        num_to_keep: Number of checkpoints to keep; None keeps all.
        checkpoint_score_attribute: Metric by which the best ones are kept; None keeps the newest.
        checkpoint_score_order: ``"max"`` or ``"min"``.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: str = "max"

    def kept(self) -> KeptCheckpoints:
        """Returns the configuration for `rankzero.Launcher`. Raises InvalidJobError for a wrong value."""
        return KeptCheckpoints(self.num_to_keep, self.checkpoint_score_attribute, self.checkpoint_score_order)


@dataclass(frozen=True)
class RunConfig(metaclass=_Options):
    """Name and storage of the run, and its other options.

    Attributes:
        name: Id of the run, which continues from the last checkpoint of an earlier one of that id; None creates one.
        storage_path: Root of the run directories, a path or an fsspec URL; None: ``$RANKZERO_STORE``, else
            ``~/.rankzero/runs``.
        failure_config: Limits of new attempts after failures.
        checkpoint_config: Options that decide which checkpoints are kept.
        worker_runtime_env: Environment variables of the workers: ``{"env_vars": {...}}``.
    """

    name: str | None = None
    storage_path: str | os.PathLike[str] | None = None
    failure_config: FailureConfig | None = None
    checkpoint_config: CheckpointConfig | None = None
    worker_runtime_env: Mapping[str, Any] | None = field(default_factory=dict)

    def __post_init__(self) -> None:
        refuse("worker_runtime_env", set(self.worker_runtime_env or {}) - {"env_vars"})
