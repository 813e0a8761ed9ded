"""`Launcher`, the main class of rankzero: `run` returns rank 0's value, `submit` returns a handle."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from rankzero import bounds, store
from rankzero.errors import InvalidJobError
from rankzero.job import Job, world_bounds
from rankzero.kinds import MODE, POSITIVE
from rankzero.options import HELP, TABLE, Options

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rankzero.kinds import WorldSize
    from rankzero.run.handle import RunHandle
    from rankzero.run.tries import PipelineTry
    from rankzero.submit.start import Request
    from rankzero.sweep import Sweep

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launcher(Options):
    """Runs training functions and scripts on all ranks. The attributes are the whole configuration.

    Attributes:
        **options: Every option of `rankzero.options.Options`, which describes them.

    Raises:
        InvalidJobError: a value is wrong; the message names it and says what to do.

    Example:
        >>> from rankzero import Launcher
        >>> def train(lr: float) -> float:
        ...     import torch, torch.distributed as dist
        ...     dist.init_process_group("gloo")
        ...     x = torch.full((1,), lr)
        ...     dist.all_reduce(x)
        ...     return x.item()
        >>> Launcher(num_processes=2).run(train, lr=0.5)
        1.0
    """

    def options(self, **changes: Any) -> Launcher:
        """Returns a copy with changed options. Raises InvalidJobError for a wrong value."""
        return replace(self, **changes)

    @overload
    def run(self, train: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def run(self, train: str | os.PathLike[str] | Sequence[str], /, *args: Any, **kwargs: Any) -> Any: ...
    def run(self, train: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Runs a training and returns rank 0's value; prints the ranks' output to standard output meanwhile.

        In a notebook, a card above the output shows the run's state, progress and curves.

        The run ends with this call: an interrupt, or the death of this process, cancels it. A later call for the same
        training with the same ``run_id`` then resumes from the last checkpoint; after a success it trains again.

        Args:
            train: A callable, ``"package.module:function"``, ``"path/to/script.py"``, ``"-m package.module"`` as for
                ``python``, or a command as a list of words, ``["bash", "train.sh"]``: any program, which succeeds by
                exit code 0. Files of a command travel in ``working_dir``.
            args: Positional arguments of the function, or the rest of the command line, in which ``${local_rank}``
                is replaced by the local rank.
            kwargs: Keyword arguments of the function.

        Returns:
            The value that rank 0 returned; for a script or module, the argument of ``rankzero.train.set_result``; None
            for a command.

        Raises:
            InvalidJobError: the job was rejected before anything started.
            WorkerFailedError: a rank failed; describes the first cause.
            RankZeroError: other subclasses for slots, time, cancellation, the result.
        """
        return follow_run(self, train, args, kwargs)[0]

    def map(
        self,
        train: Any,
        params: Iterable[Mapping[str, Any]],
        /,
        *,
        metric: str | None = None,
        mode: str = "min",
        max_parallel: int = 1,
    ) -> Sweep:
        """Runs a sweep: trains with many sets of keyword arguments, some in parallel, and compares the trials.

        Each trial is a run with its own directory, named after its arguments and ``run_id`` if this launcher has one. A
        trial that fails does not end the sweep; an interrupt of this call ends all trials. Called again with the same
        ``run_id`` after an interrupt, the sweep returns results that had succeeded, and trains only the rest. After a
        call that has returned, the next one trains all trials again, and resumes those that had failed.

        Args:
            train: As for `run`; a function that takes keyword arguments.
            params: A dict of keyword arguments for each trial.
            metric: The metric by which trials are compared: the last value that rank 0 of each reported by
                `rankzero.train.report`. A trial whose last value is nan or infinite is the worst.
            mode: ``"min"`` or ``"max"``: whether smaller or larger values are better.
            max_parallel: Trials that run at the same time.

        Returns:
            A `rankzero.sweep.Sweep`: a sequence of trials, with ``best``.

        Raises:
            InvalidJobError: the sweep was rejected before anything started.

        Example:
            >>> from rankzero import Launcher
            >>> def train(lr: float) -> float:
            ...     import rankzero.train as rt
            ...     rt.report({"loss": (lr - 0.3) ** 2})
            ...     return lr
            >>> sweep = Launcher(1).map(train, [{"lr": 0.1}, {"lr": 0.3}, {"lr": 0.9}], metric="loss", max_parallel=2)
            trial ...
            >>> sweep.best.load()
            0.3
        """
        from rankzero.run.handle import RunHandle
        from rankzero.sweep import run_trials

        POSITIVE.check("max_parallel", max_parallel)
        MODE.check("mode", mode)

        def start(run_id: str | None, kwargs: dict[str, Any]) -> AbstractContextManager[RunHandle[Any]]:
            return open_run(self.options(run_id=run_id), train, (), kwargs)

        sweep = run_trials(start, self.run_id, params, metric, max_parallel)
        sweep.metric, sweep.mode = metric, mode
        for trial in sweep:
            if trial.result:
                acknowledge(RunHandle.attach(trial.directory))
        return sweep

    @overload
    def submit(self, train: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> RunHandle[R]: ...
    @overload
    def submit(self, train: str | os.PathLike[str] | Sequence[str], /, *args: Any, **kwargs: Any) -> RunHandle[Any]: ...
    def submit(self, train: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Starts a run that outlives this process.

        Takes the arguments of `run`. Submitting the same training under one ``run_id`` again starts nothing while
        the run is live, or has succeeded: it returns the handle of that run and its result. After
        `RunHandle.acknowledge` it trains from scratch. A run that failed or was cancelled resumes from its last
        checkpoint. Another training (other code or ``code_version``, other arguments, another world size) begins
        from scratch, and is rejected while the run is live.

        Returns:
            A `RunHandle`; any other process gets one with ``RunHandle.attach(handle.directory)``.

        Raises:
            InvalidJobError: the job was rejected before anything started. In a rank, that is every job whose engine
                does not start the driver on a cluster.
            EngineError: a run of this ``run_id`` was cancelled and does not end.
        """
        from rankzero.submit import durable

        return durable.submit(self._for(train)._request(), train, args, kwargs)

    def _for(self, train: Any, *, named: bool = True) -> Launcher:
        """Returns this launcher with the options of a compatibility layer's trainer, if ``named`` its names, too."""
        methods = ("launch_options", "launch_names") if named else ("launch_options",)
        given = [method() for name in methods if callable(method := getattr(train, name, None))]
        return self.options(**{name: value for options in given for name, value in options.items()}) if given else self

    def _request(self) -> Request:
        from rankzero.engines.local import LocalEngine
        from rankzero.report.summary import prices_from_environment
        from rankzero.submit import datasets
        from rankzero.submit.code_files import UserCode
        from rankzero.submit.pack import pack_trackers
        from rankzero.submit.start import Request

        engine = LocalEngine() if self.engine is None else self.engine
        world: WorldSize | None
        if isinstance(self.num_processes, (int, tuple)):
            world = self.num_processes
        else:
            world = engine.num_processes(self.processes_per_task, use_gpu=self.use_gpu)
        if world is None:
            raise InvalidJobError(
                'num_processes="auto" needs an engine that says how many places it has (LocalEngine(), local[N], '
                "spark.executor.instances): give a number, or the smallest and the largest, such as (2, 8)"
            )
        least, most = world_bounds(world)
        own = {each.name: getattr(self, each.name) for each in fields(Job) if each.name in TABLE}
        env = dict(self.env or {})
        env |= bounds.environment(env)
        decided = {
            "run_id": self.run_id or "",
            "num_processes": most,
            "min_processes": least if isinstance(world, tuple) else None,
            "max_preemptions": self.max_restarts if self.max_preemptions is None else self.max_preemptions,
            "ports": list(self.ports) if self.ports else None,
            "checkpoints": asdict(self.checkpoints),
            "labels": dict(self.labels or {}),
            "engine": {},
        }
        return Request(
            engine,
            store.normalize(store.root_of(self.store)),
            Job(name="", prices=prices_from_environment(), **{**own, **decided}),
            self.num_processes,
            env,
            restart_on=self.restart_on,
            sources=datasets.check(self.dataset),
            code=UserCode(self.working_dir, self.py_files),
            trackers=pack_trackers(self.trackers, engine),
        )


def open_run(
    launcher: Launcher,
    train: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    caller: PipelineTry | None = None,
    log: Any = logger,
) -> AbstractContextManager[RunHandle[Any]]:
    """Opens a run, which the block follows until the run has ended.

    The run of a pipeline step's training is a new one or that of an earlier try: `RunHandle.attached` says which. If
    another try can follow, it outlives this process, and ends with the block only if an exception interrupts the block
    that the `PipelineTry` does not detach from. Any other run ends with the block and with this process.

    Args:
        launcher: The launcher. Every try of a step gives it the same ``run_id``.
        train: As for `Launcher.run`.
        args: Positional arguments of the function, or the script's command line.
        kwargs: Keyword arguments of the function.
        caller: The step's facts about its orchestrator; None outside of a pipeline.
        log: The step's logger.

    Returns:
        A context manager that yields the handle.

    Raises:
        InvalidJobError: the launcher of a step has no ``run_id``, or a relative ``store``; on entering the block, for
            the reasons of `Launcher.submit`.
    """
    from rankzero.submit import durable

    if caller is None:
        return durable.opened(launcher._for(train)._request(), train, args, kwargs, owned=True)
    if launcher.run_id is None:
        raise InvalidJobError("a step finds its run by the run_id: give Launcher(run_id=...)")
    if launcher.store is not None and not store.is_absolute(launcher.store):
        raise InvalidJobError(
            f"store is {os.fspath(launcher.store)!r}, a relative path, which would begin in the directory of this "
            "step's process; give an absolute path or a URL"
        )
    request = launcher._for(train, named=False)._request()
    return durable.open_durable(request, train, args, kwargs, caller, log)


def follow_run(
    launcher: Launcher,
    train: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    on_line: Callable[[str, str], object] | None = None,
) -> tuple[Any, RunHandle[Any]]:
    """Runs, follows and acknowledges a training for `Launcher.run` and compatibility layers; also returns the handle.

    ``on_line`` is called with each line of a rank, which begins with its ``[rank]``, and the run's name; None prints.
    """
    from rankzero.run.lines import in_notebook, print_line

    with contextlib.ExitStack() as around:
        handles: list[RunHandle[Any]] = []
        if in_notebook():
            from rankzero.report import card

            # Entered first, so that the card's last update follows the end of the run.
            around.enter_context(card.showing(handles))
        handle = around.enter_context(open_run(launcher, train, args, kwargs))
        handles.append(handle)
        if not handle.attached:
            # Else this thread takes turns with the driver's while that starts the ranks.
            handle.pause()
        for line in handle.lines(follow=True, earlier=False):
            (on_line or print_line)(line.prefixed, handle.id)
    value = handle.result()
    acknowledge(handle)
    return value, handle


def acknowledge(handle: RunHandle[Any]) -> None:
    """Acknowledges a result; only logs a failure: the next run of this id may then return this result again."""
    try:
        handle.acknowledge()
    except Exception:
        logger.warning("the result of run %s could not be acknowledged", handle.id, exc_info=True)


Launcher.__doc__ = re.sub(r"(?m)^ +\*\*options: .*\n", lambda _: HELP, Launcher.__doc__ or "")
