"""Ray's configuration classes, whose fields are translated to options of `rankzero.Launcher`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rankzero import kinds
from rankzero.compat.ray_train.callback import UserCallback
from rankzero.compat.ray_train.names import lookup
from rankzero.errors import InvalidJobError
from rankzero.job import CheckpointConfig as KeptCheckpoints

UNLIMITED = 1_000_000
"""Number of restarts for Ray's ``-1`` (no limit)."""


class RemovedError(InvalidJobError, DeprecationWarning):
    """Raised for an option that Ray has removed, with Ray's type, or that exists only on Ray's clusters."""


def removed(what: str, value: object, instead: str) -> None:
    """Raises RemovedError for an option that has a value."""
    if value is not None:
        raise RemovedError(f"{what} is not supported: {instead}")


def checked(what: str, value: Any, cls: type[Any]) -> Any:
    """Returns a value, or a new object of its class if it is None. Raises InvalidJobError for a value of another."""
    if value is None:
        return cls()
    if not isinstance(value, cls):
        raise InvalidJobError(f"{what} is a {type(value).__name__}; give rankzero.compat.ray_train.{cls.__name__}")
    return value


@dataclass(frozen=True)
class ScalingConfig:
    """The number of workers, and their resources.

    Attributes:
        num_workers: World size; 0 runs in one local process, ``(min, max)`` is elastic.
        use_gpu: Whether each worker gets a GPU.
        resources_per_worker: ``{"GPU": 1}`` means ``use_gpu``; ``"CPU"`` has no effect, since the cluster's
            configuration decides.
        placement_strategy: Accepted for compatibility; the cluster decides where tasks run.
        elastic_resize_monitor_interval_s: Accepted for compatibility; each attempt takes the workers that there are.

    Raises:
        InvalidJobError: a value is wrong, or an option exists only on Ray's clusters.
    """

    num_workers: int | tuple[int, int] = 1
    use_gpu: bool = False
    resources_per_worker: Mapping[str, float] | None = None
    placement_strategy: str = "PACK"
    accelerator_type: str | None = None
    trainer_resources: Any = None
    use_tpu: bool = False
    topology: str | None = None
    label_selector: Any = None
    elastic_resize_monitor_interval_s: float = 60.0

    def __post_init__(self) -> None:
        removed("label_selector", self.label_selector, "choose the executors in Spark's configuration")
        removed("trainer_resources", self.trainer_resources, "the trainer runs in the process that calls fit()")
        removed("use_tpu, or topology,", self.use_tpu or self.topology or None, "there are no TPUs here")
        removed("accelerator_type", self.accelerator_type, "choose the executors in Spark's configuration")
        kinds.FLAG.check("use_gpu", self.use_gpu)
        sizes = self.num_workers if isinstance(self.num_workers, tuple) else (self.num_workers,) * 2
        if len(sizes) != 2 or {type(size) for size in sizes} != {int} or not 0 <= sizes[0] <= sizes[1]:
            raise InvalidJobError(f"num_workers is {self.num_workers!r}; it must be a whole number, or (min, max)")
        resources = dict(self.resources_per_worker or {})
        if self.num_gpus_per_worker not in (0, 1):
            raise InvalidJobError(f"resources_per_worker has GPU={resources['GPU']}; a worker has one GPU or none")
        if unknown := set(resources) - {"CPU", "GPU", "memory"}:
            raise InvalidJobError(f"resources_per_worker has {', '.join(sorted(unknown))}; it may have CPU and GPU")

    @property
    def num_gpus_per_worker(self) -> float:
        """Returns the number of GPUs of each worker, 0 or 1."""
        return (self.resources_per_worker or {}).get("GPU", 1 if self.use_gpu else 0)

    @property
    def num_cpus_per_worker(self) -> float:
        """Returns the CPUs of each worker by Ray's rule: 1, or with a GPU none, unless they are given."""
        return self._per_worker.get("CPU", 0)

    @property
    def max_workers(self) -> int:
        """Returns the largest number of workers."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]

    @property
    def total_resources(self) -> dict[str, float]:
        """Returns the resources of all workers by Ray's rules; of the largest world if the training is elastic."""
        return {name: float(count * self.max_workers) for name, count in self._per_worker.items()}

    @property
    def _per_worker(self) -> dict[str, float]:
        given = dict(self.resources_per_worker or ({} if self.use_gpu else {"CPU": 1}))
        return {**given, "GPU": self.num_gpus_per_worker} if self.num_gpus_per_worker else given


@dataclass(frozen=True)
class TorchConfig:
    """Options of the process group, which is created before the training function is called.

    Attributes:
        backend: ``"nccl"`` or ``"gloo"``; None: nccl with GPUs, else gloo.
        init_method: Accepted for compatibility; workers always use environment variables.
        timeout_s: Timeout of a collective in seconds.
    """

    backend: str | None = None
    init_method: str = "env"
    timeout_s: float = 1800

    def __post_init__(self) -> None:
        kinds.BACKEND.check("backend", self.backend)
        kinds.SECONDS.check("timeout_s", self.timeout_s)


@dataclass(frozen=True)
class FailureConfig:
    """Limits of new attempts after failures.

    Attributes:
        max_failures: New attempts, from the last checkpoint, after any failure of a worker; -1 for no limit.
        fail_fast: Refused, since Ray has removed it.
        max_preemption_failures: New attempts after the cluster has preempted a worker; -1 for no limit.
        controller_failure_limit: Accepted for compatibility; another process resumes a run whose driver died.
        relax_collectives_on_preemption: Accepted for compatibility; clusters give no notice of a preemption.
        preemption_grace_s: Accepted for compatibility, for the same reason.
    """

    max_failures: int = 0
    fail_fast: Any = None
    max_preemption_failures: int = -1
    controller_failure_limit: int = -1
    relax_collectives_on_preemption: bool = False
    preemption_grace_s: float = 0.0

    def __post_init__(self) -> None:
        removed("fail_fast", self.fail_fast or None, "a failure ends the run immediately unless max_failures is set")
        kinds.FLAG.check("relax_collectives_on_preemption", self.relax_collectives_on_preemption)
        for name in ("max_failures", "max_preemption_failures", "controller_failure_limit"):
            value = getattr(self, name)
            if type(value) is not int or value < -1:
                raise InvalidJobError(f"{name} is {value!r}; it must be an integer of -1 (no limit) or more")


@dataclass(frozen=True)
class CheckpointConfig:
    """Options that decide which checkpoints are kept.

    Attributes:
        num_to_keep: Number of checkpoints to keep; None keeps all.
        checkpoint_score_attribute: Metric by which the best ones are kept; None keeps the newest.
        checkpoint_score_order: ``"max"`` or ``"min"``.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: str = "max"
    checkpoint_frequency: Any = None
    checkpoint_at_end: Any = None

    def __post_init__(self) -> None:
        report = "call train.report(metrics, checkpoint=...) when there is one"
        removed("checkpoint_frequency", self.checkpoint_frequency or None, report)
        removed("checkpoint_at_end", self.checkpoint_at_end or None, report)
        self.kept()

    def kept(self) -> KeptCheckpoints:
        """Returns the configuration for `rankzero.Launcher`. Raises InvalidJobError for a wrong value."""
        return KeptCheckpoints(self.num_to_keep, self.checkpoint_score_attribute, self.checkpoint_score_order)


@dataclass(frozen=True)
class DataConfig:
    """Decides which data sets are shared among the workers.

    Attributes:
        datasets_to_split: Names of the data sets of which each worker gets a share, or ``"all"``. Each worker gets all
            rows of the others.
        execution_options: Refused, since it configures Ray's own execution.
        enable_shard_locality: Accepted for compatibility.
    """

    datasets_to_split: Literal["all"] | Sequence[str] = "all"
    execution_options: Any = None
    enable_shard_locality: bool = True

    def __post_init__(self) -> None:
        removed("execution_options", self.execution_options, "Spark, or the torch data set, decides how rows are read")
        removed("configure", getattr(self, "configure", None), "give datasets_to_split, or share rows in the data set")
        split = self.datasets_to_split
        if split != "all" and (isinstance(split, str) or not all(isinstance(name, str) for name in split)):
            raise InvalidJobError(f'datasets_to_split is {split!r}; it must be "all" or a list of names')

    def splits(self, name: str) -> bool:
        """Returns True if each worker gets a share of the data set."""
        return self.datasets_to_split == "all" or name in self.datasets_to_split


@dataclass(frozen=True)
class RunConfig:
    """Name and storage of the run, and its other options.

    Attributes:
        name: Id of the run; None creates one.
        storage_path: Root of the run directories, a path or an fsspec URL; None: ``$RANKZERO_STORE``, else
            ``~/.rankzero/runs``.
        failure_config: Limits of new attempts after failures.
        checkpoint_config: Options that decide which checkpoints are kept.
        worker_runtime_env: Environment variables of the workers: ``{"env_vars": {...}}``.
        callbacks: `UserCallback` objects, which the driver calls.

    Raises:
        InvalidJobError: an option was removed by Ray, or exists only on Ray's clusters.
    """

    name: str | None = None
    storage_path: str | os.PathLike[str] | None = None
    failure_config: FailureConfig | None = None
    checkpoint_config: CheckpointConfig | None = None
    worker_runtime_env: Mapping[str, Any] = field(default_factory=dict)
    storage_filesystem: Any = None
    callbacks: Sequence[Any] | None = None
    logging_config: Any = None
    sync_config: Any = None
    verbose: Any = None
    stop: Any = None
    progress_reporter: Any = None
    log_to_file: Any = None

    def __post_init__(self) -> None:
        if self.name is not None:
            kinds.RUN_ID.check("run_id", self.name)
        removed("storage_filesystem", self.storage_filesystem, "give storage_path as an fsspec URL")
        checked("failure_config", self.failure_config, FailureConfig)
        checked("checkpoint_config", self.checkpoint_config, CheckpointConfig)
        options = str(self.storage_path).partition("://")[2].partition("?")[2]
        removed(f"{options} in storage_path", options or None, "use the environment, such as AWS_ENDPOINT_URL")
        for callback in self.callbacks or ():
            if not isinstance(callback, UserCallback):
                raise InvalidJobError(f"callbacks has {callback!r}; give objects of subclasses of UserCallback")
        removed("logging_config", self.logging_config, 'use logging.getLogger("rankzero").setLevel(...)')
        removed("sync_config", self.sync_config, "checkpoints are in the store when they are committed")
        removed("verbose", self.verbose, "the workers' lines go to standard output")
        removed("stop", self.stop, "return from the training function")
        removed("progress_reporter", self.progress_reporter, "use rankzero.train.progress")
        removed("log_to_file", self.log_to_file, "the run directory keeps each worker's log")
        if unknown := set(self.worker_runtime_env) - {"env_vars"}:
            names = ", ".join(sorted(unknown))
            raise InvalidJobError(f"worker_runtime_env has {names}; only env_vars: install packages on the executors")
        kinds.STRINGS.check("worker_runtime_env['env_vars']", self.worker_runtime_env.get("env_vars"))


__getattr__ = lookup(__name__)
