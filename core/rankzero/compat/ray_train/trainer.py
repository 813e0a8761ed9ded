"""`TorchTrainer`: Ray's trainer, on a `rankzero.Launcher`."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import rankzero.train as rt
from rankzero import store
from rankzero.compat.ray_train import callback, checkpoint, config, dataset
from rankzero.compat.ray_train.checkpoint import Checkpoint
from rankzero.compat.ray_train.config import checked, removed
from rankzero.compat.ray_train.names import INSTEAD, lookup
from rankzero.compat.ray_train.result import Result, result_of, with_failures
from rankzero.errors import InvalidJobError, RankZeroError, RunNotFoundError
from rankzero.run.directory import RunDirectory
from rankzero.values.pickled import open_packed

if TYPE_CHECKING:
    from rankzero.launcher import Launcher


class TorchTrainer:
    """Ray's ``TorchTrainer``: runs a training function on every worker.

    A trainer can replace a training function: ``launcher.run(trainer)``, an Airflow task and a Dagster asset accept it,
    and use its number of workers, restarts and checkpoints.

    Args:
        train_loop_per_worker: A function of no argument, or of the configuration.
        train_loop_config: The configuration; its `rankzero.ResultRef` values are opened in the workers.
        torch_config: Options of the process group.
        scaling_config: Number of workers, and their resources.
        run_config: Name and storage of the run, restarts, checkpoints.
        datasets: Torch data sets, DataFrames or paths of tables by name, for `get_dataset_shard`.
        torch_backend: Another name of ``torch_config``, found in Ray's guides.
        dataset_config: Data sets of which each worker gets all rows; None shares all.
        resume_from_checkpoint: The checkpoint that `get_checkpoint` returns until the run has one of its own. The
            workers have to see its directory.
        launcher: The engine, and options that Ray lacks. None: the active SparkSession, else this machine.
        metadata, validation_config: Options of Ray that are refused.

    Raises:
        InvalidJobError: a value is wrong, or an option is not supported.

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
        torch_config: config.TorchConfig | None = None,
        scaling_config: config.ScalingConfig | None = None,
        run_config: config.RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        torch_backend: config.TorchConfig | None = None,
        dataset_config: config.DataConfig | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
        launcher: Launcher | None = None,
        metadata: None = None,
        validation_config: None = None,
    ) -> None:
        if torch_backend is not None:
            warnings.warn("torch_backend is called torch_config", DeprecationWarning, stacklevel=2)
            torch_config = torch_backend
        removed("metadata", metadata, "use Launcher(labels=...), or train_loop_config")
        removed("validation_config", validation_config, INSTEAD["ValidationConfig"])
        if not callable(train_loop_per_worker):
            raise InvalidJobError(f"train_loop_per_worker is {train_loop_per_worker!r}; it must be a function")
        self._wants_config = _wants_config(train_loop_per_worker)
        self.train_loop_per_worker = train_loop_per_worker
        # Under this name core opens the references in it.
        self.launch_config = dict(train_loop_config or {})
        self.torch_config = checked("torch_config", torch_config, config.TorchConfig)
        self.scaling_config = checked("scaling_config", scaling_config, config.ScalingConfig)
        self.run_config = checked("run_config", run_config, config.RunConfig)
        self.datasets = dict(datasets or {})
        self.dataset_config = checked("dataset_config", dataset_config, config.DataConfig)
        if whole := [name for name in self._tables() if not self.dataset_config.splits(name)]:
            raise InvalidJobError(
                f"datasets_to_split leaves out {whole[0]}, a table, of which every worker gets a share: read a table "
                "that each worker needs as a whole in the training function"
            )
        if resume_from_checkpoint is not None:
            checked("resume_from_checkpoint", resume_from_checkpoint, Checkpoint)
        self.resume_from_checkpoint = resume_from_checkpoint
        self._launcher = launcher

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for workers, without what may hold credentials: the launcher and the environment.

        The number of restarts is left out, too: a training with another one is the same training.
        """
        own = {name: data for name, data in self.datasets.items() if name not in self._tables()}
        run_config = replace(self.run_config, worker_runtime_env={}, failure_config=None)
        return {**vars(self), "_launcher": None, "datasets": own, "run_config": run_config}

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchTrainer:
        """Returns a copy in this process, which keeps what `__getstate__` leaves out."""
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def _tables(self) -> dict[str, Any]:
        """Returns the data sets that the launcher delivers: DataFrames and paths. All others are pickled."""
        return {name: data for name, data in self.datasets.items() if is_table(data)}

    def fit(self) -> Result:
        """Trains, and returns the result; the workers' lines go to standard output.

        Raises:
            InvalidJobError: the training was refused before it started.
            TrainingFailedError: a worker or the run failed; the error describes the first cause.
        """
        try:
            value, handle = self._base().followed(self, (), {})
        except RankZeroError as error:
            with_failures(error)
            raise
        return result_of(handle, value)

    @classmethod
    def can_restore(cls, path: str | os.PathLike[str], storage_filesystem: None = None) -> bool:
        """Returns True if ``storage_path/name``, a path or a URL, is the directory of a run."""
        try:
            return RunDirectory(os.fspath(path)).find_job() is not None
        except RunNotFoundError:
            return False

    @classmethod
    def restore(
        cls,
        path: str | os.PathLike[str],
        train_loop_per_worker: Callable[..., Any] | None = None,
        train_loop_config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> TorchTrainer:
        """Returns a trainer that continues a run from its last checkpoint, as one with the same name and storage does.

        Args:
            path: Path of the run directory: ``storage_path/name``.
            train_loop_per_worker: The training function; None for the run's own.
            train_loop_config: The configuration; None for the run's own.
            options: Other arguments of the trainer, in place of the run's own. Those that hold data or secrets are not
                stored: ``datasets`` that are tables, ``launcher``, environment variables.

        Raises:
            InvalidJobError: the directory is another user's, or was not made by a trainer.
            RunNotFoundError: the directory has no run.
        """
        run = RunDirectory(os.fspath(path))
        job = run.job()
        if run.is_remote:
            raise InvalidJobError(
                f"{run.directory} is remote: make the trainer again, with the run's name and storage_path"
            )
        if why := store.why_untrusted(run.directory):
            # The pickle is executed as this user.
            raise InvalidJobError(f"the run directory {run.directory} {why}")
        trainer = open_packed(run.submission_path(job.submission, "payload.pkl")).get("function")
        if not isinstance(trainer, TorchTrainer):
            raise InvalidJobError(f"the run in {run.directory} was not made by a TorchTrainer")
        storage, _, name = run.directory.rpartition("/")
        failures = config.FailureConfig(job.max_restarts, max_preemption_failures=job.max_preemptions)
        run_config = replace(trainer.run_config, name=name, storage_path=storage, failure_config=failures)
        kept = ("torch_config", "scaling_config", "datasets", "dataset_config", "resume_from_checkpoint")
        own = {"run_config": run_config, **{name: getattr(trainer, name) for name in kept}}
        function = trainer.train_loop_per_worker if train_loop_per_worker is None else train_loop_per_worker
        values = trainer.launch_config if train_loop_config is None else train_loop_config
        return cls(function, train_loop_config=values, **{**own, **options})

    def _base(self) -> Launcher:
        from rankzero.compat.torch_distributor import active_session
        from rankzero.engines.specs import engine_of_session
        from rankzero.launcher import Launcher

        if self._launcher is not None:
            return self._launcher
        if not self.scaling_config.num_workers and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise InvalidJobError("num_workers is 0 in a rank of torchrun: start the script with python, and give it")
        session = active_session() if self.scaling_config.num_workers else None
        return Launcher(engine=None if session is None else engine_of_session(session))

    def launch_options(self) -> dict[str, Any]:
        """Returns the options of `rankzero.Launcher` that this trainer sets, also for a launcher of the caller."""
        scaling, run = self.scaling_config, self.run_config
        failures = run.failure_config or config.FailureConfig()
        options: dict[str, Any] = {
            "num_processes": scaling.num_workers or 1,
            "use_gpu": bool(scaling.num_gpus_per_worker),
            "max_restarts": config.UNLIMITED if failures.max_failures < 0 else failures.max_failures,
            "max_preemptions": config.UNLIMITED
            if failures.max_preemption_failures < 0
            else failures.max_preemption_failures,
            "checkpoints": (run.checkpoint_config or config.CheckpointConfig()).kept(),
        }
        given = {
            "restart_on": (BaseException,) if failures.max_failures else (),
            "dataset": self._tables(),
            "backend": self.torch_config.backend,
            "env": run.worker_runtime_env.get("env_vars"),
        }
        return options | {name: value for name, value in given.items() if value}

    def launch_names(self) -> dict[str, Any]:
        """Returns the name and the store of the run, which a pipeline step replaces by its own."""
        given = {"run_id": self.run_config.name, "store": self.run_config.storage_path}
        return {name: value for name, value in given.items() if value}

    @property
    def train_loop_config(self) -> dict[str, Any]:
        """Returns the configuration; in a worker its references are opened."""
        return self.launch_config

    @property
    def resumes_by_name(self) -> bool:
        """Returns True if the run has a name: as in Ray, it resumes the run of that name, whatever has changed."""
        return self.run_config.name is not None

    def __call__(self) -> Any:
        """Creates the process group and calls the training function, in one worker."""
        dataset.install(self.datasets, self.dataset_config)
        checkpoint.resumed[:] = [self.resume_from_checkpoint] if self.resume_from_checkpoint else []
        callback.installed[:] = self.run_config.callbacks or ()
        context = rt.get_context()
        # Accelerate would take every GPU of the machine for its own.
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(context.device)
        if context.device.type == "cpu":
            # Accelerate would take the worker for the only one.
            os.environ["ACCELERATE_USE_CPU"] = "true"
        os.environ["NODE_RANK"] = str(context.node_rank)
        rt.ensure_process_group(timedelta(seconds=self.torch_config.timeout_s))
        try:
            return self.train_loop_per_worker(*([self.launch_config] if self._wants_config else []))
        except Exception as error:
            for each in callback.installed:
                each.after_exception(context, {context.rank: error})
            raise

    def __repr__(self) -> str:
        return f"TorchTrainer({getattr(self.train_loop_per_worker, '__name__', 'train')})"


def is_table(data: object) -> bool:
    """Returns True for a Spark DataFrame and for the path of a table."""
    return isinstance(data, (str, os.PathLike)) or type(data).__module__.startswith("pyspark.sql.")


def _wants_config(function: Callable[..., Any]) -> bool:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len([p for p in positional if p.default is p.empty]) > 1:
        raise InvalidJobError(f"{function!r} has several arguments; a training function has none, or the configuration")
    return bool(positional)


__getattr__ = lookup(__name__)
