"""`TorchDistributorResource`: runs training from an asset or an op."""

import functools
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, overload

import dagster as dg
from pydantic import Field, PrivateAttr, ValidationError

from dagster_rankzero.fields import ADDED, LauncherFields, added_to, check_fields, resolve_variables
from dagster_rankzero.inputs import without_annotations, without_dagster
from dagster_rankzero.metadata import build_result, check_single, observe, single_output, takes_reference

if TYPE_CHECKING:
    from dagster_rankzero.step import Step
    from rankzero import RunHandle

P = ParamSpec("P")
R = TypeVar("R")
Program = str | os.PathLike[str] | Sequence[str]

DEFAULT_RESOURCE_KEY = "torch_distributor"
"""Default key of the resource for `torch_asset` and `torch_distributor_op`."""

OBSERVATION_INTERVAL = 5.0
"""Least seconds between two observations, each of which is a row in the event log."""


class TorchDistributorResource(LauncherFields):
    """Runs distributed PyTorch on Spark and delivers rank 0's value to the IO manager.

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

    observation_interval: float | None = Field(
        default=OBSERVATION_INTERVAL,
        description="Seconds between two observations of an asset with rank 0's metrics at least; null for none.",
    )
    by_reference: bool | None = Field(
        default=None,
        description="Deliver a ResultRef instead of the value, so that the step never loads a large result. Left out: "
        "to a RankZeroIOManager, which stores the file that it stands for, unless the output has a type that Dagster "
        "checks. Any other IO manager would store the small handle, good as long as the run directory is kept.",
    )
    retry_user_errors: bool = Field(
        default=True,
        description="Let a RetryPolicy apply to exceptions of the training function too, "
        "not only to killed ranks and errors of the infrastructure.",
    )
    name: str | None = Field(
        default=None,
        description="Name of one of several trainings of a step; all tries of the step find its run by it. A second "
        "training without a name of its own is refused.",
    )
    log_ranks: list[int] | None = Field(
        default=None,
        description="Whose lines the step shows, such as [0]; left out: all. A rank whose failure ends the run is "
        "shown as well, and every line is in the run directory.",
    )

    _offered: "list[tuple[RunHandle[Any], Step]]" = PrivateAttr(default_factory=list)
    # Copies share the list, since Dagster tears down only the resource that it has set up.

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
        fields = type(self).model_fields
        if "num_processes" in changes:
            # A single number is not elastic, also if this resource is.
            changes = {"min_processes": None, **changes}
        # Dagster's configuration has no type for a DataFrame, which is kept outside of it.
        given = changes.get("dataset", self._dataset)
        is_text = isinstance(given, (str, type(None)))
        if "dataset" in changes and not is_text:
            changes = {**changes, "dataset": None}
        try:
            check_fields(type(self), changes)
            changes = {name: resolve_variables(value) for name, value in changes.items()}
            for name in ADDED.intersection(changes):
                changes[name] = added_to(getattr(self, name), changes[name])
            copy = type(self)(**{**{name: getattr(self, name) for name in fields}, **changes})
            copy._dataset = None if is_text else given
            copy._offered = self._offered
            return copy
        except (dg.DagsterInvalidDefinitionError, ValidationError) as error:
            raise dg.Failure(f"wrong options of {type(self).__name__}: {error}", allow_retries=False) from error

    @overload
    def run(
        self, context: dg.AssetExecutionContext, train: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> dg.MaterializeResult[R]: ...
    @overload
    def run(
        self, context: dg.AssetExecutionContext, train: Program, /, *args: Any, **kwargs: Any
    ) -> dg.MaterializeResult[Any]: ...
    @overload
    def run(
        self, context: dg.OpExecutionContext, train: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> dg.Output[R]: ...
    @overload
    def run(self, context: dg.OpExecutionContext, train: Program, /, *args: Any, **kwargs: Any) -> dg.Output[Any]: ...
    def run(self, context: Any, train: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Runs a training to its end; the ranks' lines go to standard output, which Dagster keeps as compute logs.

        The run has the same id in all tries of the step; a step that trains twice gives one of the two a name, as in
        ``torch_distributor.options(name="tuned").run(...)``. If Dagster will try again automatically (a
        `dagster.RetryPolicy`, run retries), the training survives the death of the step's process, and the next try
        attaches to it or gets its result. Otherwise it ends with the step's process. A training that has failed resumes
        from its last checkpoint. Terminating the Dagster run ends the ranks.

        For an asset, rank 0's metrics are logged as observations during the training.

        Args:
            context: Context of the asset or op that calls this.
            train: A callable, ``"package.module:function"``, ``"path/to/script.py"``, ``"-m package.module"``, or a
                command as a list of words, ``["bash", "train.sh"]``.
            args: Positional arguments of the function, or the script's command line. `ResultRef`
                in them are opened inside the ranks; a `dagster.Config` arrives as a plain namespace.
            kwargs: Keyword arguments of the function.

        Returns:
            With the context of an asset a `dagster.MaterializeResult`, else a `dagster.Output`;
            return it from the asset or op. Its value is rank 0's, or with ``by_reference`` a `ResultRef`
            with ``load()``; its metadata describes the run. For an asset without a value (``specs=``,
            ``-> None``) it has metadata only.

        Raises:
            dagster.Failure: a rank failed (metadata: rank, host, traceback, last log lines), the run
                hung, was cancelled or took too long, the arguments or fields are wrong, the step
                makes several assets, or the infrastructure failed. A `dagster.RetryPolicy` applies
                unless the next try would end the same way.
            dagster.DagsterExecutionInterruptedError: Dagster has interrupted the step.
        """
        check_single(context)
        return self._run(context, train, args, kwargs)

    def _run(self, context: Any, train: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The assets of the step are not checked here, since torch_multi_asset makes their results itself.
        result = None
        events = self._events(context, train, args, kwargs)
        for event in events:
            if isinstance(event, dg.AssetObservation):
                try:
                    context.log_event(event)
                except Exception as error:
                    # A lost observation must not stop the training.
                    context.log.warning("an observation could not be stored: %s", error)
                except BaseException as interrupt:
                    events.throw(interrupt)
            else:
                result = event
        return result

    @overload
    def stream(
        self, context: dg.AssetExecutionContext, train: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Iterator[dg.AssetObservation | dg.MaterializeResult[R]]: ...
    @overload
    def stream(
        self, context: dg.AssetExecutionContext, train: Program, /, *args: Any, **kwargs: Any
    ) -> Iterator[dg.AssetObservation | dg.MaterializeResult[Any]]: ...
    @overload
    def stream(
        self, context: dg.OpExecutionContext, train: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Iterator[dg.Output[R]]: ...
    @overload
    def stream(
        self, context: dg.OpExecutionContext, train: Program, /, *args: Any, **kwargs: Any
    ) -> Iterator[dg.Output[Any]]: ...
    def stream(self, context: Any, train: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Runs a training like `run`, and yields Dagster's events while the ranks train, and the result at the end.

        Closing the generator before its end ends the run.

        Args:
            context: Context of the asset or op.
            train: A function, script, module or command, as for `run`.
            args: Positional arguments of the function, or the script's command line.
            kwargs: Keyword arguments of the function.

        Yields:
            For an asset a `dagster.AssetObservation` with rank 0's numeric metrics as ``metric/NAME``, at most one
            in ``observation_interval`` seconds; at the end the result that `run` returns.

        Raises:
            dagster.Failure: as `run`.

        Example:
            >>> @dg.asset
            ... def model(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource):
            ...     yield from torch_distributor.stream(context, train, lr=1e-3)
        """
        check_single(context)
        return self._events(context, train, args, kwargs)

    def _events(
        self, context: Any, train: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Generator[Any, None, None]:
        # Imported here, so that only a step that trains loads the core.
        from dagster_rankzero.step import Step, as_failure, follow, offer, open_run
        from rankzero import RankZeroError
        from rankzero.pipeline import print_line

        handle: RunHandle[Any] | None = None
        step, output = Step.of(context), single_output(context)
        shipped = without_annotations(train), without_dagster(args), without_dagster(kwargs)
        try:
            with open_run(self._launcher(), step, context, *shipped, name=self.name) as opened:
                handle = opened.handle
                show = functools.partial(print_line, run_id=handle.id)
                interval = self.observation_interval
                for metrics in follow(opened, step, context.log, show, interval, self.log_ranks):
                    yield from observe(context, metrics)
            is_reference = takes_reference(context, output) if self.by_reference is None else self.by_reference
            value = handle.result_ref() if is_reference else handle.result()
            if step is not None:
                offer(handle, step, context.log)
                self._offered.append((handle, step))
        except RankZeroError as error:
            raise as_failure(error, handle, step, retry_user_errors=self.retry_user_errors) from error
        yield build_result(context, handle, value, output)
