"""The options of `rankzero.Launcher` as Dagster configuration, with the same names and defaults.

Configuration classes here refuse unknown fields, with a message that suggests fields of similar spelling. Dagster
ignores them, so that a misspelt ``master`` would train on another Spark cluster.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_origin

import dagster as dg
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationInfo, field_validator, model_validator

import rankzero
from dagster_rankzero._compat import variable_of
from rankzero.errors import InvalidJobError
from rankzero.pipeline import (
    AUTO,
    NumProcesses,
    qualified_name,
    spelt,
    step_options,
    store,
    with_matches,
    world_bounds,
)

if TYPE_CHECKING:
    from rankzero.pipeline import Engine

OPTIONS = step_options(
    orphan_timeout={
        "help": "Seconds for which a training continues after the process of its step has died, until the next try of "
        "the step attaches to it. None: the longest delay of the retry policy plus 15 minutes."
    }
)
"""The options of a run, by name, that are fields of the resource."""

ADDED = frozenset({"env", "spark_conf"})
"""Fields whose entries in the options of one training are added to those of the resource."""


def option_field(name: str) -> Any:
    """Returns the field of an option of a run, with its default, and its help for the UI."""
    option = OPTIONS[name]
    default = [] if option.default == () else {} if get_origin(option.kind.plain) is dict else option.default
    return Field(default=default, description=option.help.replace("None", "null").replace("``", "`"))


class KnownFields(dg.Config):
    """A configuration class that refuses unknown fields.

    Raises:
        dagster.DagsterInvalidDefinitionError: a field does not exist; the error suggests fields of similar spelling.
    """

    # Errors reach Dagster's event log, and a value may be a password or contain a token.
    model_config = ConfigDict(hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, given: Any) -> Any:
        if isinstance(given, dict):
            check_fields(cls, given)
        return given

    @classmethod
    def configure_at_launch(cls, **fields: Any) -> Any:
        """Returns a resource or an IO manager whose other fields are set in the launchpad.

        Raises:
            dagster.DagsterInvalidDefinitionError: a field does not exist.
        """
        check_fields(cls, fields)
        return super().configure_at_launch(**fields)  # type: ignore[misc]


def check_fields(owner: type[BaseModel], given: Iterable[str]) -> None:
    """Raises DagsterInvalidDefinitionError if one of the names is not a field of the class, with suggestions."""
    known = [field.alias or name for name, field in owner.model_fields.items()]
    if unknown := ", ".join(with_matches(str(name), known) for name in given if name not in known):
        raise dg.DagsterInvalidDefinitionError(
            f"{owner.__name__} has no field {unknown}; its fields are {', '.join(known)}"
        )


def resolve_variables(value: Any) -> Any:
    """Returns a value, or the values of a dict, with each `dagster.EnvVar` replaced by its current value.

    Dagster itself replaces only those of a resource in the definitions, not those of changes for one step.

    Raises:
        dagster.DagsterInvalidDefinitionError: a variable is not set.
    """
    if isinstance(value, dict):
        return {key: resolve_variables(item) for key, item in value.items()}
    name = variable_of(value)
    if name is None:
        return value
    found = value.get_value()
    if found is None:
        raise dg.DagsterInvalidDefinitionError(f"the environment variable {name} is not set where the step runs")
    return found


def added_to(base: Mapping[str, str], changes: Any) -> Any:
    """Returns a mapping with the entries of another one; None as a value removes an entry. Other values are returned.

    Example:
        >>> added_to({"a": "1", "b": "2"}, {"b": None, "c": "3"})
        {'a': '1', 'c': '3'}
    """
    if not isinstance(changes, Mapping):
        return changes
    return {name: value for name, value in {**base, **changes}.items() if value is not None}


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
        "Left out: an embedded local[N] with as many slots as there are tasks, or without pyspark engine local.",
    )
    deploy_mode: str = Field(
        default="client",
        description="client: the driver of a run is a process beside the step's. cluster: it runs on the Spark cluster "
        "(spark://..., yarn) and outlives the step's pod; the store must be one that the cluster sees.",
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
    # Options of a run, made by `make reference`:
    use_gpu: bool = option_field("use_gpu")
    processes_per_task: int = option_field("processes_per_task")
    cpus_per_process: int | None = option_field("cpus_per_process")
    backend: str | None = option_field("backend")
    env: dict[str, str] = option_field("env")
    timeout: float | None = option_field("timeout")
    start_timeout: float = option_field("start_timeout")
    hang_timeout: float | None = option_field("hang_timeout")
    orphan_timeout: float | None = option_field("orphan_timeout")
    max_restarts: int = option_field("max_restarts")
    restart_on: list[str] = option_field("restart_on")
    store: str | None = option_field("store")
    dataset: str | None = option_field("dataset")
    max_preemptions: int | None = option_field("max_preemptions")
    stop_grace: float = option_field("stop_grace")
    exit_timeout: float = option_field("exit_timeout")
    ports: list[int] | None = option_field("ports")
    warm_start: bool = option_field("warm_start")
    encrypt: bool | None = option_field("encrypt")
    code_version: str | None = option_field("code_version")
    working_dir: str | None = option_field("working_dir")
    py_files: list[str] = option_field("py_files")
    excludes: list[str] = option_field("excludes")
    # The end of these options.
    checkpoints: Checkpoints = Field(
        default_factory=Checkpoints,
        description="Which checkpoints are kept: num_to_keep, metric, mode, as a dict or a CheckpointConfig.",
    )
    trackers: dg.ResourceDependency[Any] = []  # type: ignore[assignment]  # noqa: RUF012
    _dataset: Any = PrivateAttr(default=None)

    @field_validator("*", mode="wrap")
    @classmethod
    def _check(cls, given: Any, validate: Any, info: ValidationInfo) -> Any:
        """Checks a number, flag or text as `rankzero.Launcher` does, when definitions load.

        Accepts a `dagster.EnvVar` for a flag or a number, too; Dagster resolves it in the step's process.
        """
        if variable_of(given):
            return given
        value, option = validate(given), OPTIONS.get(str(info.field_name))
        try:
            if option and option.name != "dataset" and isinstance(value, (str, int, float)):
                return option.check(value)
            if info.field_name == "master" and value is not None:
                if value.startswith("sc://"):
                    raise ValueError("master is the address of a Spark Connect server; give it as connect")
                rankzero.SparkEngine(master=value)
        except InvalidJobError as error:
            raise ValueError(str(error)) from None
        return value

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
            least, most = world_bounds(OPTIONS["num_processes"].check(size))
            return {**given, "num_processes": most, "min_processes": least}
        return {**given, "num_processes": None} if size == AUTO else given

    @property
    def _world(self) -> NumProcesses:
        if self.num_processes is None:
            return AUTO
        return self.num_processes if self.min_processes is None else (self.min_processes, self.num_processes)

    @field_validator("env", "spark_conf", mode="before")
    @classmethod
    def _as_texts(cls, given: Any) -> Any:
        """Returns a mapping whose numbers and flags are text, spelt as in Spark.

        YAML has them, and Dagster renders a template whose text is a number as that number.
        """
        if not isinstance(given, Mapping):
            return given
        # A whole number of the environment is its variable.
        return {
            name: dg.EnvVar(found) if (found := variable_of(value)) else spelt(value) for name, value in given.items()
        }

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

    def _launcher(self) -> "rankzero.Launcher":
        if self.store is not None and not store.is_absolute(self.store):
            raise InvalidJobError(
                f"store is {self.store!r}, a relative path, which would begin in the directory of the step's process; "
                "give an absolute path or a URL"
            )
        options = {name: getattr(self, name) for name in OPTIONS}
        options |= {
            "num_processes": self._world,
            "env": dict(self.env),
            "checkpoints": rankzero.CheckpointConfig(**dict(self.checkpoints)),
        }
        if self._dataset is not None:
            options["dataset"] = self._dataset
        return rankzero.Launcher(engine=self._engine(), **options)

    def _engine(self) -> "Engine":
        if self.engine == "local":
            return rankzero.LocalEngine()
        if self.connect is not None:
            if self.master is not None or self.spark_conf:
                raise InvalidJobError("connect names a Spark Connect server: give it without master and spark_conf")
            return rankzero.SparkConnectEngine(self.connect)
        if self.deploy_mode != "client":
            return rankzero.SparkSubmitEngine(master=self.master, conf=self.spark_conf)
        if self.master is None:
            from rankzero.pipeline import embedded_engine

            return embedded_engine(self.spark_conf)
        return rankzero.SparkEngine(master=self.master, conf=self.spark_conf)
