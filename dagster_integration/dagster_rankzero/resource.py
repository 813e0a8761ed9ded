"""`TorchDistributorResource`: runs training from an asset or an op, with the options of `rankzero.Launcher`."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar, get_origin, overload

import dagster as dg
from pydantic import Field, PrivateAttr, ValidationError, ValidationInfo, field_validator, model_validator

import rankzero
from dagster_rankzero._compat import KnownFields, check_fields, variable_of
from dagster_rankzero.metadata import check_single
from rankzero.errors import InvalidJobError
from rankzero.pipeline import step_options

if TYPE_CHECKING:
    from dagster_rankzero.step import Step

P = ParamSpec("P")
R = TypeVar("R")
NumProcesses = int | tuple[int, int] | Literal["auto"]
Program = str | os.PathLike[str] | Sequence[str]

DEFAULT_RESOURCE_KEY = "torch_distributor"
"""Default key of the resource for `torch_asset` and `torch_distributor_op`."""

OPTIONS = step_options(
    orphan_timeout={
        "help": "Seconds for which a training continues after the process of its step has died, until the next try of "
        "the step attaches to it. None: the longest delay of the retry policy plus 15 minutes."
    }
)
"""The options of a run, by name, that are fields of the resource."""

_ADDED = frozenset({"env", "spark_conf"})
# Fields whose entries in the options of one training are added to those of the resource.

_CHOICES = {"engine": ("spark", "local"), "deploy_mode": ("client", "cluster")}
# Checked here, since a field with choices in Dagster cannot be an EnvVar.


def _field(default: Any, description: str) -> Any:
    return Field(default=default, description=description)


def option_field(name: str) -> Any:
    """Returns the field of an option of a run, with its default, and its help for the UI."""
    option = OPTIONS[name]
    default = [] if option.default == () else {} if get_origin(option.kind.plain) is dict else option.default
    return Field(default=default, description=option.help.replace("None", "null").replace("``", "`"))


class Checkpoints(KnownFields):
    """Options that decide which checkpoints of a run are kept: the fields of `rankzero.CheckpointConfig`."""

    num_to_keep: int | None = _field(2, "Number of checkpoints to keep; null keeps all. The newest is always kept.")
    metric: str | None = _field(None, "Keep the best by this metric of their reports; null keeps the newest.")
    mode: Literal["min", "max"] = _field("min", "Which values of the metric are better.")


def _as_texts(field: str, given: Any) -> Any:
    """Returns a mapping whose numbers and flags are text, spelt as in Spark: YAML and Dagster's templates make them."""
    if not isinstance(given, Mapping):
        return given
    # A whole number of the environment is its variable.
    variables = {name: dg.EnvVar(found) for name, value in given.items() if (found := variable_of(value))}
    return OPTIONS["env"].kind.check(field, {**given, **variables})


def _as_names(given: Any) -> Any:
    items = [given] if isinstance(given, (str, type)) else given
    names = [f"{item.__module__}.{item.__qualname__}" if isinstance(item, type) else item for item in items]
    return [name.removeprefix("builtins.") if isinstance(name, str) else name for name in names]


_PLAIN: dict[str, Callable[[Any], Any]] = {
    "env": partial(_as_texts, "env"),
    "spark_conf": partial(_as_texts, "spark_conf"),
    "restart_on": _as_names,
    "checkpoints": lambda given: vars(given) if isinstance(given, rankzero.CheckpointConfig) else given,
}
# Functions that make configuration of the values that Python and YAML have for some fields.


class TorchDistributorResource(KnownFields, dg.ConfigurableResource):  # type: ignore[type-arg]
    """Runs distributed PyTorch on Spark and delivers rank 0's value to the IO manager.

    ``trackers`` is not configuration but a list of objects; see `rankzero.tracking.Tracker`.

    Raises:
        dagster.DagsterInvalidDefinitionError: a field does not exist.
        pydantic.ValidationError: a field has a value of the wrong type.

    Example:
        >>> @dg.asset
        ... def model(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource):
        ...     return torch_distributor.options(num_processes=4).run(context, train, lr=1e-3)
        >>> defs = dg.Definitions(
        ...     assets=[model],
        ...     resources={"torch_distributor": TorchDistributorResource(master="spark://master:7077")},
        ... )
    """

    engine: str = _field("spark", "Where ranks run: spark, a barrier stage; or local, processes of this machine.")
    master: str | None = _field(
        None,
        "Spark master: local[N], spark://host:port, yarn or k8s://..., or a Spark Connect server: sc://host:15002, or "
        "with a token, as an EnvVar, sc://host:443/;use_ssl=true;token=... Left out: an embedded local[N] with a slot "
        "for each task, or without pyspark engine local.",
    )
    deploy_mode: str = _field(
        "client",
        "client: the driver of a run is a process beside the step's. cluster: it runs on the cluster and outlives "
        "the step's pod; the cluster must reach the store.",
    )
    spark_conf: dict[str, str] = _field({}, "Spark configuration of the session that a run starts.")
    num_processes: int | None = _field(
        1, 'World size, the number of ranks; null (in Python "auto") for as many as the engine has slots.'
    )
    min_processes: int | None = _field(
        None, "Smallest world size of an elastic run; left out: num_processes. In Python num_processes=(2, 8)."
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
    # The end of these options.
    checkpoints: Checkpoints = Field(
        default_factory=Checkpoints, description="Which checkpoints are kept, as a dict or a CheckpointConfig."
    )
    trackers: dg.ResourceDependency[Any] = []  # type: ignore[assignment]  # noqa: RUF012
    observation_interval: float | None = _field(
        5.0, "Seconds between two observations of an asset with rank 0's metrics at least; null for none."
    )
    by_reference: bool | None = _field(
        None,
        "Deliver a ResultRef instead of the value, so that the step never loads a large result. Left out: to a "
        "RankZeroIOManager, unless the output has a type that Dagster checks. Any other IO manager would store the "
        "small handle, good as long as the run directory is kept.",
    )
    retry_user_errors: bool = _field(True, "Let a RetryPolicy apply to exceptions of the training function too.")
    name: str | None = _field(None, "Name of one of several trainings of a step, by which all its tries find its run.")
    log_ranks: list[int] | None = _field(
        None,
        "Ranks whose lines the step shows, such as [0], besides the rank whose failure ends the run; left out: all.",
    )
    _dataset: Any = PrivateAttr(default=None)
    # Copies share the list, since Dagster tears down only the resource that it has set up.
    _offered: "list[tuple[rankzero.RunHandle[Any], Step]]" = PrivateAttr(default_factory=list)

    @field_validator("*", mode="wrap")
    @classmethod
    def _check(cls, given: Any, validate: Any, info: ValidationInfo) -> Any:
        """Checks a value as `rankzero.Launcher` does, when definitions load.

        Accepts a `dagster.EnvVar` for a flag or a number, too; Dagster resolves it in the step's process.
        """
        if variable_of(given):
            return given
        name = str(info.field_name)
        value, option, choices = validate(_PLAIN.get(name, lambda it: it)(given)), OPTIONS.get(name), _CHOICES.get(name)
        if choices and value not in choices:
            raise ValueError(f"choose {' or '.join(choices)}, not {value!r}")
        try:
            if option and name != "dataset" and isinstance(value, (str, int, float)):
                return option.check(value)
            if name == "master" and value is not None and not value.startswith("sc://"):
                rankzero.SparkEngine(master=value)
        except InvalidJobError as error:
            raise ValueError(str(error)) from None
        return value

    @model_validator(mode="before")
    @classmethod
    def _split_pair(cls, given: Any) -> Any:
        """Splits an elastic world size into two fields and turns ``auto`` into None: Dagster's fields have one type."""
        size = given.get("num_processes") if isinstance(given, dict) else None
        if isinstance(size, (tuple, list)):
            least, most = OPTIONS["num_processes"].check(size)
            return {**given, "num_processes": most, "min_processes": least}
        return {**given, "num_processes": None} if size == "auto" else given

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """Acknowledges the results that Dagster has stored, since their Dagster run may be deleted later."""
        from dagster_rankzero.step import acknowledge

        while self._offered:
            acknowledge(*self._offered.pop(), context.log)

    def options(self, **changes: Any) -> Self:
        """Returns a copy of the resource with changed fields, for one run.

        Args:
            changes: Field names of this class and their new values; a `dagster.EnvVar` is resolved immediately. The
                entries of ``env`` and ``spark_conf`` are added to those of this resource; None as a value removes one.

        Raises:
            dagster.Failure: a field does not exist or has a value of the wrong type. Not retried.

        Example:
            >>> TorchDistributorResource(master="local[4]").options(num_processes=4).num_processes
            4
        """
        try:
            # Dagster itself resolves only the variables of a resource in the definitions.
            return self._changed({name: _resolved(value) for name, value in changes.items()})
        except (dg.DagsterInvalidDefinitionError, ValidationError) as error:
            raise dg.Failure(f"wrong options of {type(self).__name__}: {error}", allow_retries=False) from error

    def _changed(self, changes: Mapping[str, Any]) -> Self:
        check_fields(type(self), changes)
        changes = {name: self._added_to(name, value) for name, value in changes.items()}
        if "num_processes" in changes:
            # A single number is not elastic, also if this resource is.
            changes = {"min_processes": None, **changes}
        # Dagster's configuration has no type for a DataFrame, which is kept outside of it.
        dataset = changes.get("dataset", self._dataset)
        is_text = isinstance(dataset, (str, type(None)))
        if "dataset" in changes and not is_text:
            changes = {**changes, "dataset": None}
        copy = type(self)(**{**{name: getattr(self, name) for name in type(self).model_fields}, **changes})
        copy._dataset, copy._offered = None if is_text else dataset, self._offered
        return copy

    def _added_to(self, name: str, value: Any) -> Any:
        """Returns the new value of a field: some mappings are added, and None as a value removes an entry."""
        if name not in _ADDED or not isinstance(value, Mapping):
            return value
        return {key: item for key, item in {**getattr(self, name), **value}.items() if item is not None}

    @overload
    def run(
        self, context: dg.AssetExecutionContext, train: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> dg.MaterializeResult[R]: ...
    @overload
    def run(
        self, context: dg.OpExecutionContext, train: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> dg.Output[R]: ...
    @overload
    def run(self, context: Any, train: Program, /, *args: Any, **kwargs: Any) -> Any: ...
    def run(self, context: Any, train: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Runs a training to its end; the ranks' lines go to standard output, which Dagster keeps as compute logs.

        The run has the same id in all tries of the step, so that the next try attaches to it, gets its result, or
        resumes it from its last checkpoint; a further training of the step has a name, as in
        ``torch_distributor.options(name="tuned").run(...)``. If Dagster will not try again, the training ends with the
        step's process. Terminating the Dagster run ends the ranks. For an asset, rank 0's metrics are logged as
        observations during the training.

        Args:
            context: Context of the asset or op that calls this.
            train: A callable, ``"package.module:function"``, ``"path/to/script.py"``, ``"-m package.module"``, or a
                command as a list of words, ``["bash", "train.sh"]``.
            args: Positional arguments of the function, or the script's command line. `ResultRef` in them are opened
                inside the ranks; a `dagster.Config` arrives as a plain namespace.
            kwargs: Keyword arguments of the function. A Spark DataFrame is a dataset, whose name the ranks get.

        Returns:
            With the context of an asset a `dagster.MaterializeResult`, else a `dagster.Output`; return it from the
            asset or op. Its value is rank 0's, or with ``by_reference`` a `ResultRef`; its metadata describes the run.
            For an asset without a value (``specs=``, ``-> None``) it has metadata only.

        Raises:
            dagster.Failure: the training failed (metadata: rank, host, traceback, last log lines), or cannot run as
                asked for. A `dagster.RetryPolicy` applies unless the next try would end the same way.
            dagster.DagsterExecutionInterruptedError: Dagster has interrupted the step.
        """
        check_single(context)
        return self._run(context, train, args, kwargs)

    def _run(self, context: Any, train: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The assets of the step are not checked here, since torch_multi_asset makes their results itself.
        from dagster_rankzero.step import train_in_step

        return train_in_step(self, context, train, args, kwargs)

    @property
    def _given_dataset(self) -> Any:
        return self.dataset if self._dataset is None else self._dataset

    def _launcher(self) -> rankzero.Launcher:
        """Returns the launcher with these options. Raises rankzero.InvalidJobError for what does not go together."""
        world: Any = self.num_processes or "auto"
        if self.num_processes and self.min_processes is not None:
            world = self.min_processes, self.num_processes
        options = {name: getattr(self, name) for name in OPTIONS}
        options |= {"num_processes": world, "env": dict(self.env), "dataset": self._given_dataset}
        options["checkpoints"] = rankzero.CheckpointConfig(**dict(self.checkpoints))
        return rankzero.Launcher(engine=self._engine(), **options)

    def _engine(self) -> Any:
        if self.engine == "local":
            return rankzero.LocalEngine()
        if (self.master or "").startswith("sc://"):
            return rankzero.SparkConnectEngine(self.master)
        if self.deploy_mode != "client":
            return rankzero.SparkSubmitEngine(master=self.master, conf=self.spark_conf)
        if self.master is None:
            return rankzero.SparkEngine.embedded(self.spark_conf)
        return rankzero.SparkEngine(master=self.master, conf=self.spark_conf)


def _resolved(value: Any) -> Any:
    """Returns a value, or the values of a dict, with each `dagster.EnvVar` replaced by its current value."""
    if isinstance(value, dict):
        return {key: _resolved(item) for key, item in value.items()}
    if (name := variable_of(value)) and value.get_value() is None:
        raise dg.DagsterInvalidDefinitionError(f"the environment variable {name} is not set where the step runs")
    return value.get_value() if name else value
