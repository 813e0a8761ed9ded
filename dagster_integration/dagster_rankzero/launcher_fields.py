"""The options of `rankzero.Launcher` as Dagster configuration: the same names, the same defaults."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import dagster as dg
from pydantic import Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from dagster_rankzero._compat import variable_of
from dagster_rankzero.fields import KnownFields
from rankzero.pipeline import AUTO, EXIT_TIMEOUT, STOP_GRACE, NumProcesses, check_counts, qualified_name, world_bounds

if TYPE_CHECKING:
    from rankzero import Launcher
    from rankzero.pipeline import Engine


_CHOICES = {"engine": ("spark", "local"), "deploy_mode": ("client", "cluster")}
# Checked here, since a field with choices in Dagster cannot be an EnvVar.


class Checkpoints(KnownFields):
    """Options that decide which checkpoints of a run are kept: the fields of `rankzero.CheckpointConfig`."""

    num_to_keep: int | None = Field(
        default=2, description="Number of checkpoints to keep; null keeps all. The newest one is always kept."
    )
    metric: str | None = Field(
        default=None, description="Keep the best by this metric of their reports; null keeps the newest."
    )
    mode: Literal["min", "max"] = Field(default="min", description="Which values of the metric are better.")


class LauncherFields(KnownFields, dg.ConfigurableResource):  # type: ignore[type-arg]
    """Options with which training functions and scripts are run.

    ``trackers`` is not configuration but a list of objects, such as ``[MLflow()]``, that send the metrics and events of
    a training to other systems; see `rankzero.tracking.Tracker`.
    """

    engine: str = Field(
        default="spark",
        description="Where the ranks run: as one barrier stage of Spark, or as processes of this machine "
        "without Spark, which starts in a second and suits tests. Local runs ignore master and spark_conf.",
    )
    master: str | None = Field(
        default=None,
        description="Spark master: local[N], spark://host:port, yarn or k8s://... "
        "Left out: an embedded local[N] with as many slots as there are tasks.",
    )
    deploy_mode: str = Field(
        default="client",
        description="client: the driver of a run is a process beside the step's. cluster: it runs on the Spark cluster "
        "(spark://..., yarn, k8s://...) and outlives the step's pod; the store must be one that the cluster sees.",
    )
    connect: str | None = Field(
        default=None,
        description="Spark Connect server instead of a master: sc://host:15002, or with what a client needs beside "
        "that, sc://host:443/;use_ssl=true;token=... (an EnvVar). It has its configuration: spark_conf is not for it.",
    )
    spark_conf: dict[str, str] = Field(
        default_factory=dict, description="Spark configuration of the session that a run starts."
    )
    num_processes: int | None = Field(
        default=1,
        description='World size, the number of ranks; null (in Python num_processes="auto") for as many as the engine '
        "is known to have places for.",
    )
    min_processes: int | None = Field(
        default=None,
        description="The smallest world size: each attempt starts with as many ranks between it and num_processes as "
        "the cluster can give. Left out: num_processes, always. In Python num_processes=(2, 8) says both.",
    )
    processes_per_task: int = Field(default=1, description="Ranks in one Spark task; must divide num_processes.")
    cpus_per_process: int | None = Field(
        default=None,
        description="Cores of each rank, which also set its OMP_NUM_THREADS; on a cluster Spark reserves them. "
        "Left out: as the Spark settings have it.",
    )
    use_gpu: bool = Field(default=False, description="Give every rank one GPU; refuse to run without.")
    backend: str | None = Field(
        default="auto",
        description="Of the process group: auto (nccl with GPUs, else gloo), nccl, gloo, or null "
        "if the training function decides.",
    )
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables for the ranks.")
    store: str | None = Field(
        default=None,
        description="Root of the run directories, an absolute path or an fsspec URL. "
        "Left out: $RANKZERO_STORE, else ~/.rankzero/runs.",
    )
    timeout: float | None = Field(default=None, description="Seconds a run may take once every rank has started.")
    start_timeout: float = Field(default=600.0, description="Seconds until every rank must have started.")
    hang_timeout: float | None = Field(
        default=None,
        description="Seconds without a report or an optimizer step of any rank after which an attempt ends.",
    )
    max_restarts: int = Field(
        default=0,
        description="New attempts, from the last checkpoint, within one step: after a killed rank, a lost host or "
        "executor, a hang, a RetryableError.",
    )
    restart_on: list[str] = Field(
        default_factory=list,
        description="Exceptions of the function that count among max_restarts: parts of their type and message, or "
        "qualified names of their classes.",
    )
    max_preemptions: int | None = Field(
        default=None,
        description="New attempts after the cluster took a place back; null for as many as max_restarts.",
    )
    stop_grace: float = Field(
        default=STOP_GRACE, description="Seconds between SIGTERM and SIGKILL when a run ends early."
    )
    exit_timeout: float = Field(
        default=EXIT_TIMEOUT,
        description="Seconds that a rank's exit handlers and threads that are no daemons get once every rank has "
        "returned.",
    )
    orphan_timeout: float | None = Field(
        default=None,
        description="Seconds for which a training continues after the process of its step has died, until the next "
        "try of the step attaches to it. Left out: the longest delay of the retry policy plus 15 minutes.",
    )
    ports: list[int] | None = Field(
        default=None,
        description="First and last port on which the driver and rank 0 may listen, for firewalls; null lets the "
        "system choose.",
    )
    checkpoints: Checkpoints = Field(
        default_factory=Checkpoints,
        description="Which checkpoints are kept: num_to_keep, metric, mode, as a dict or a CheckpointConfig.",
    )
    warm_start: bool = Field(
        default=True,
        description="Fork ranks from a process that has torch loaded, one for each executor; false starts every "
        "rank as a new interpreter.",
    )
    encrypt: bool | None = Field(
        default=None,
        description="Encrypt what crosses between a run's driver and its agents. Left out: where Spark's own "
        "connections are encrypted.",
    )
    code_version: str | None = Field(
        default=None,
        description="Version of the code in the identity of a training. Left out: the content of the code, so that a "
        "step whose function, script or modules have changed starts from scratch.",
    )
    working_dir: str | None = Field(
        default=None,
        description="A directory that travels with the job: each rank starts in a copy of it. In a "
        "component's YAML a relative path, also of py_files, begins in the component's folder, else in the working "
        "directory of the step's process.",
    )
    py_files: list[str] = Field(
        default=[],
        description="Python files, zips, wheels and directories of packages that travel, for ranks to import.",
    )
    excludes: list[str] = Field(
        default=[], description="Patterns, as in a .gitignore, of what in working_dir and py_files stays here."
    )

    dataset: str | None = Field(
        default=None,
        description="What ranks read: the path or URL of a table, or with Spark the name of one or a query. In Python "
        "options(dataset=...) takes a Spark DataFrame, a ResultRef of a table, or a dict of these by name, too.",
    )
    trackers: dg.ResourceDependency[Any] = []  # type: ignore[assignment]  # noqa: RUF012
    _dataset: Any = PrivateAttr(default=None)

    @field_validator("*", mode="wrap")
    @classmethod
    def _let_variables_through(cls, given: Any, validate: Any) -> Any:
        """Accepts a `dagster.EnvVar` for a flag or a number, too; Dagster resolves it in the step's process."""
        return given if variable_of(given) else validate(given)

    @field_validator("engine", "deploy_mode")
    @classmethod
    def _is_choice(cls, given: str, info: ValidationInfo) -> str:
        choices = _CHOICES[str(info.field_name)]
        if given not in choices and not variable_of(given):
            raise ValueError(f"choose {', '.join(choices[:-1])} or {choices[-1]}, not {given!r}")
        return given

    @model_validator(mode="before")
    @classmethod
    def _split_pair(cls, given: Any) -> Any:
        """Splits an elastic world size into two fields and turns ``auto`` into None: Dagster's fields have one type."""
        size = given.get("num_processes") if isinstance(given, dict) else None
        if isinstance(size, (tuple, list)):
            least, most = world_bounds(check_counts(size, 1))
            return {**given, "num_processes": most, "min_processes": least}
        return {**given, "num_processes": None} if size == AUTO else given

    @property
    def _world(self) -> NumProcesses:
        if self.num_processes is None:
            return AUTO
        return self.num_processes if self.min_processes is None else (self.min_processes, self.num_processes)

    @field_validator("restart_on", mode="before")
    @classmethod
    def _as_names(cls, given: Any) -> Any:
        items = [given] if isinstance(given, (str, type)) else given
        return [qualified_name(item) if isinstance(item, type) else item for item in items]

    @field_validator("checkpoints", mode="before")
    @classmethod
    def _as_fields(cls, given: Any) -> Any:
        is_config = dataclasses.is_dataclass(given) and not isinstance(given, type)
        return dataclasses.asdict(given) if is_config else given

    def _launcher(self, env: Mapping[str, str]) -> "Launcher":
        from rankzero import CheckpointConfig, InvalidJobError, Launcher
        from rankzero.pipeline import store

        if self.store is not None and not store.is_absolute(self.store):
            raise InvalidJobError(
                f"store is {self.store!r}, a relative path, which would begin in the directory of the step's process; "
                "give an absolute path or a URL"
            )
        return Launcher(
            self._world,
            engine=self._engine(),
            use_gpu=self.use_gpu,
            processes_per_task=self.processes_per_task,
            cpus_per_process=self.cpus_per_process,
            backend=self.backend,
            env={**self.env, **env},
            timeout=self.timeout,
            start_timeout=self.start_timeout,
            hang_timeout=self.hang_timeout,
            orphan_timeout=self.orphan_timeout,
            max_restarts=self.max_restarts,
            restart_on=tuple(self.restart_on),
            max_preemptions=self.max_preemptions,
            stop_grace=self.stop_grace,
            exit_timeout=self.exit_timeout,
            store=self.store,
            ports=None if self.ports is None else tuple(self.ports),  # type: ignore[arg-type]
            checkpoints=CheckpointConfig(**dict(self.checkpoints)),
            warm_start=self.warm_start,
            encrypt=self.encrypt,
            code_version=self.code_version,
            working_dir=self.working_dir,
            py_files=self.py_files,
            excludes=self.excludes,
            trackers=self.trackers,
            dataset=self.dataset if self._dataset is None else self._dataset,
        )

    def _engine(self) -> "Engine":
        if self.engine == "local":
            from rankzero import LocalEngine

            return LocalEngine()
        if self.connect is not None:
            from rankzero import InvalidJobError, SparkConnectEngine

            if self.master is not None or self.spark_conf:
                raise InvalidJobError("connect names a Spark Connect server: give it without master and spark_conf")
            return SparkConnectEngine(self.connect)
        from rankzero import SparkEngine, SparkSubmitEngine

        if self.deploy_mode == "client":
            return SparkEngine(master=self.master, conf=self.spark_conf)
        return SparkSubmitEngine(master=self.master, conf=self.spark_conf)
