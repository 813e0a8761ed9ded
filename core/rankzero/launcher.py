"""`Launcher`, the main class of rankzero: `run` returns rank 0's value, `submit` returns a handle."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from rankzero import job as jobs
from rankzero import store
from rankzero.bounds import EXIT_TIMEOUT, STOP_GRACE
from rankzero.errors import InvalidJobError
from rankzero.job import Job
from rankzero.report.cost import prices_from_environment
from rankzero.run.checkpoints import CheckpointConfig
from rankzero.run.handle import RunHandle

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rankzero.engines.base import Engine
    from rankzero.run.identity import Identity
    from rankzero.run.tries import PipelineTry
    from rankzero.submit import durable
    from rankzero.submit.prepare import Request
    from rankzero.submit.user_code import UserCode
    from rankzero.sweep import Search, StopRule, Sweep
    from rankzero.sweep.trials import Mode
    from rankzero.tracking.tracker import Tracker

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)

STORE_VARIABLE = "RANKZERO_STORE"
DEFAULT_STORE = "~/.rankzero/runs"


_unshown: list[int] = []
"""The id of the stream that could not be written, so that this is logged once."""


def print_line(line: str) -> None:
    """Writes a line of a rank to standard output.

    The lines are also in the run directory. A process without standard output prints none, and a stream that fails (a
    full disk, a closed pipe) is logged once: it must not end the run.
    """
    stream = sys.stdout
    if stream is None:
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
        stream.flush()
    except (OSError, ValueError) as error:
        if _unshown != [id(stream)]:
            _unshown[:] = [id(stream)]
            logger.warning("the lines of the ranks cannot be written to standard output (%s); the run continues", error)


@dataclass(frozen=True)
class Launcher:
    """Runs training functions and scripts on all ranks. The attributes are the whole configuration.

    Attributes:
        num_processes: World size, the number of ranks. ``"auto"``: one rank for each slot that the engine reports: a
            GPU with ``use_gpu``, else a core of this machine or a task slot of the cluster. A pair such as ``(2, 8)``
            is elastic: each attempt starts with as many ranks between the two as the cluster has slots (once no
            more have become free for 30 s), and continues from the last checkpoint.
        engine: The engine that runs the ranks: `LocalEngine()` (the default for None), `SparkEngine(...)`,
            `SparkConnectEngine(...)`.
        use_gpu: True assigns one GPU to each rank. Without enough GPUs the job is rejected.
        processes_per_task: Ranks in one Spark task. Must divide ``num_processes``.
        cpus_per_process: Cores of each rank, which also set its ``OMP_NUM_THREADS``. On a cluster a task then takes
            ``cpus_per_process * processes_per_task`` cores, whatever the session's ``spark.task.cpus``; a task that
            takes all cores of an executor gets one for itself. None: the session decides.
        backend: Backend of the process group: ``"auto"`` (nccl with GPUs, else gloo), ``"nccl"``, ``"gloo"``,
            or None if the training function decides. The function reads it as ``get_context().backend``.
        env: Environment variables for the ranks.
        timeout: Seconds the run may take, all attempts together, once every rank has started; None for no limit.
        start_timeout: Seconds until every rank of an attempt must have started.
        hang_timeout: Seconds after which an attempt in which no rank progresses ends with a `HangError`; None
            for no limit. Progress is a call of `rankzero.train.report` or a step of a torch optimizer. Ranks that wait
            in a collective for ranks that have returned end with that error after 5 minutes in any case.
        orphan_timeout: Seconds without a follower after which a submitted run cancels itself; None lets it
            continue. `RunHandle.wait`, ``result``, ``logs(follow=True)`` and ``events(follow=True)`` follow.
        max_restarts: New attempts, from the last checkpoint, after a rank was killed by a signal, a host or
            executor was lost, a hang, a `RetryableError`, or an exception that ``restart_on`` names. Other exceptions
            of the function end the run.
        restart_on: Exceptions of the function that count among ``max_restarts``: texts and classes, such as
            ``("CUDA error", ConnectionError)``, or a function that is called with the exception, in the rank that
            raised it, and returns True for another attempt. A text matches as a part of ``type: message``, or as the
            qualified name of a class of the exception.
        store: Root of the run directories, a path or an fsspec URL. None: ``$RANKZERO_STORE``, else
            ``~/.rankzero/runs``.
        run_id: Name of the run; None creates a random one. A live run is not started twice; one that failed or
            was cancelled resumes from its last checkpoint; see `submit` for one that succeeded.
        dataset: Data that ranks read by `rankzero.train.get_dataset_shard`: a Spark DataFrame, the path or URL of a
            Parquet, Delta or Arrow table, or with a Spark engine the name of a table or a query; or a dict of these by
            name. A single one has the name ``"train"``. Spark computes a DataFrame once, into the run's directory.
        max_preemptions: New attempts after the cluster took a slot back (SIGTERM from outside); None for as
            many as ``max_restarts``, counted separately.
        stop_grace: Seconds between SIGTERM and SIGKILL when a run ends early: time to save a checkpoint.
        exit_timeout: Seconds that a rank's exit handlers and non-daemon threads get once every rank has
            returned, for example to finish an upload. The rank's log names those that were cut off.
        ports: First and last port on which the driver and rank 0 may listen, for firewalls; None lets the
            system choose. The ports of a collective library's connections are not affected.
        checkpoints: Which checkpoints are kept.
        warm_start: True forks ranks from a warm server, a process with torch loaded, of which each executor has one
            that ends with it. False starts every rank as a new interpreter.
        encrypt: True encrypts the connections between the run's driver and its agents, for arguments, results,
            checkpoints and lines that do not use the store. None: if Spark encrypts its own connections. Traffic
            between ranks is torch's, and is not encrypted.

        labels: Labels of the run, which are kept in its ``job.json``: see `RunHandle.labels`.
        code_version: Replaces the code in the identity of the training. None: the code counts by content, so that a
            run id whose function, script or modules have changed begins from scratch.
        working_dir: A directory that is shipped with the job: each rank starts in a copy of it, which is first on its
            search path. Hidden files, files named like a key or a password, and files that match a
            ``.rankzeroignore`` there (in the format of .gitignore) are not shipped.
        py_files: Python files, zips, eggs, wheels and directories of packages to ship, for ranks to import. Modules
            that a function or script imports are shipped automatically; these are for imports that cannot be found.
        excludes: Patterns, as in a .gitignore, of files in ``working_dir`` and ``py_files`` that are not shipped.
        trackers: External systems that receive the run's events, such as ``[MLflow()]``: see
            `rankzero.tracking.Tracker`. A run never waits for a tracker, and never fails because of one.

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

    num_processes: jobs.NumProcesses = 1
    _: KW_ONLY
    engine: Engine | None = None
    use_gpu: bool = False
    processes_per_task: int = 1
    cpus_per_process: int | None = None
    backend: str | None = "auto"
    env: Mapping[str, str] | None = field(default=None, repr=False)
    timeout: float | None = None
    start_timeout: float = 600.0
    hang_timeout: float | None = None
    orphan_timeout: float | None = None
    max_restarts: int = 0
    restart_on: jobs.RestartOn = ()
    store: str | os.PathLike[str] | None = None
    run_id: str | None = None
    dataset: Any = None
    max_preemptions: int | None = None
    stop_grace: float = STOP_GRACE
    exit_timeout: float = EXIT_TIMEOUT
    ports: tuple[int, int] | None = None
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    warm_start: bool = True
    encrypt: bool | None = None
    labels: Mapping[str, str] | None = None
    code_version: str | None = None
    working_dir: str | os.PathLike[str] | None = None
    py_files: Sequence[str | os.PathLike[str]] = ()
    excludes: Sequence[str] = ()
    trackers: Sequence[Tracker] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.num_processes == jobs.AUTO:
            jobs.check_counts(self.processes_per_task, self.processes_per_task)
        else:
            object.__setattr__(self, "num_processes", jobs.check_counts(self.num_processes, self.processes_per_task))
        object.__setattr__(self, "restart_on", jobs.check_restart_on(self.restart_on))
        jobs.check_choices(self.use_gpu, self.backend)
        jobs.check_seconds("timeout", self.timeout)
        jobs.check_seconds("start_timeout", self.start_timeout, optional=False)
        jobs.check_strings("env", self.env)
        jobs.check_run_id(self.run_id)
        if self.store is not None and not isinstance(self.store, (str, os.PathLike)):
            raise InvalidJobError(f"store is {self.store!r}; it must be a path or an fsspec URL")
        jobs.check_seconds("hang_timeout", self.hang_timeout)
        jobs.check_seconds("orphan_timeout", self.orphan_timeout)
        jobs.check_seconds("stop_grace", self.stop_grace, optional=False)
        jobs.check_seconds("exit_timeout", self.exit_timeout, optional=False)
        jobs.check_limit("cpus_per_process", self.cpus_per_process, optional=True, least=1)
        if self.cpus_per_process is not None and self.num_processes == jobs.AUTO:
            raise InvalidJobError('num_processes="auto" does not know cpus_per_process: give the number of ranks')
        jobs.check_limit("max_restarts", self.max_restarts)
        jobs.check_limit("max_preemptions", self.max_preemptions, optional=True)
        jobs.check_ports(self.ports)
        jobs.check_flag("warm_start", self.warm_start)
        if self.encrypt is not None:
            jobs.check_flag("encrypt", self.encrypt)
        jobs.check_strings("labels", self.labels)
        if self.code_version is not None and not isinstance(self.code_version, str):
            raise InvalidJobError(f"code_version is {self.code_version!r}; it must be a string or None")
        jobs.check_paths("working_dir", () if self.working_dir is None else (self.working_dir,))
        jobs.check_paths("py_files", self.py_files)
        jobs.check_paths("excludes", self.excludes)
        if self.trackers:
            from rankzero.submit import trackers

            trackers.check(self.trackers)
        if not isinstance(self.checkpoints, CheckpointConfig):
            raise InvalidJobError(f"checkpoints is {self.checkpoints!r}; give a CheckpointConfig")
        if self.dataset is not None:
            from rankzero.submit import datasets

            datasets.check(self.dataset)

    def options(self, **changes: Any) -> Launcher:
        """Returns a copy with changed fields. Raises InvalidJobError for a field that does not exist."""
        unknown = set(changes) - set(self.__dataclass_fields__)
        if unknown:
            raise InvalidJobError(f"Launcher has no option {', '.join(sorted(unknown))}")
        return replace(self, **changes)

    def find(self) -> RunHandle[Any] | None:
        """Returns the run with ``run_id`` in this store, or None if there is none yet. Starts nothing.

        Raises:
            InvalidJobError: this launcher has no ``run_id``, or the store cannot be read.
        """
        if self.run_id is None:
            raise InvalidJobError("find() looks for the run that run_id names: give Launcher(run_id=...)")
        from rankzero.run.directory import RunDirectory
        from rankzero.submit import submission

        return submission.find(RunDirectory(store.join(self._root(), self.run_id)))

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
                exit code 0. Files that a command names by relative paths are shipped with it.
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
        value, _ = self.followed(train, args, kwargs)
        return value

    def followed(
        self,
        train: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        on_line: Callable[[str], object] = print_line,
    ) -> tuple[Any, RunHandle[Any]]:
        """Runs, follows and acknowledges a training like `run`, and also returns the handle; for compatibility layers.

        Args:
            train: As for `run`.
            args: Positional arguments of the function, or the script's command line.
            kwargs: Keyword arguments of the function.
            on_line: Called with each line of a rank, which begins with its ``[rank]``.

        Returns:
            Rank 0's value, and the handle of the run that has ended.

        Raises:
            RankZeroError: the same errors as `run`.
        """
        from rankzero.report import notebook

        with notebook.showing() as show, self.owned(train, args, kwargs) as handle:
            show(handle)
            for line in handle.lines(handle.log_starts(), follow=True, prefix=True):
                on_line(line)
        value = handle.result()
        self._acknowledge(handle)
        return value, handle

    @staticmethod
    def _acknowledge(handle: RunHandle[Any]) -> None:
        """Acknowledges a result; only logs a failure: the next run of this id may then return this result again."""
        try:
            handle.acknowledge()
        except Exception:
            logger.warning("the result of run %s could not be acknowledged", handle.id, exc_info=True)

    def map(
        self,
        train: Any,
        params: Iterable[Mapping[str, Any]] | Search,
        /,
        *,
        metric: str | None = None,
        mode: Mode = "min",
        max_parallel: int = 1,
        stop: StopRule | None = None,
    ) -> Sweep:
        """Runs a sweep: trains with many sets of keyword arguments, some in parallel, and compares the trials.

        Each trial is a run with its own directory, named after its arguments and ``run_id`` if this launcher has one. A
        trial that fails does not end the sweep; an interrupt of this call ends all trials. Called again with the
        same ``run_id`` after an interrupt, the sweep returns results that had succeeded, and trains only the rest;
        trials may then be added, left out or reordered. A DataFrame is computed once for all trials. Trials share
        this engine: with ``SparkEngine(session=...)`` one session, and the cluster needs slots for
        ``max_parallel`` of them; with ``SparkEngine(master=...)`` each starts its own.

        Args:
            train: As for `run`; a function that takes keyword arguments.
            params: A dict of keyword arguments for each trial, or a `rankzero.sweep.OptunaSearch`.
            metric: The metric by which trials are compared: the last value that rank 0 of each reported by
                `rankzero.train.report`. A trial whose last value is nan or infinite is the worst.
            mode: ``"min"`` or ``"max"``: whether smaller or larger values are better.
            max_parallel: Trials that run at the same time.
            stop: Rule that ends trials early: a `rankzero.sweep.MedianRule` or `rankzero.sweep.SuccessiveHalving`.

        Returns:
            A `rankzero.sweep.Sweep`: a sequence of trials, with ``best`` and, as a table, ``rows()``.

        Raises:
            InvalidJobError: the sweep was rejected before anything started.

        Example:
            >>> from rankzero import Launcher
            >>> def train(lr: float) -> float:
            ...     import rankzero.train as rt
            ...     rt.report({"loss": (lr - 0.3) ** 2})
            ...     return lr
            >>> sweep = Launcher(1).map(train, [{"lr": 0.1}, {"lr": 0.3}, {"lr": 0.9}], metric="loss", max_parallel=2)
            >>> sweep.best.load()
            0.3
        """
        from rankzero.submit import datasets
        from rankzero.sweep.search import ListedParams, Search
        from rankzero.sweep.trials import RunNames, run_trials

        jobs.check_limit("max_parallel", max_parallel)
        if max_parallel < 1:
            raise InvalidJobError(f"max_parallel is {max_parallel!r}; it must be 1 or more")
        if mode not in ("min", "max"):
            raise InvalidJobError(f'mode is {mode!r}; use "min" or "max"')
        if stop is not None and metric is None:
            raise InvalidJobError('stop= decides by a metric: give metric="loss"')
        search = params if isinstance(params, Search) else ListedParams(params)

        names = RunNames(self.run_id)
        request = self._for(train)._request()
        sources, rows = datasets.share(request.sources, request.engine, request.root, request.template)
        trials = self.options(dataset=sources) if rows else self

        def start(given: dict[str, Any]) -> AbstractContextManager[RunHandle[Any]]:
            return trials.options(run_id=names.of(given)).owned(train, (), given)

        sweep = run_trials(start, search, metric, mode, max_parallel, stop)
        if rows and (self.run_id is None or all(trial.result for trial in sweep.trials)):
            # No trial can be resumed any more.
            store.remove(rows.directory)
        for trial in sweep.trials:
            if trial.result:
                self._acknowledge(RunHandle.attach(trial.directory))
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
            InvalidJobError: the job was rejected before anything started.
            EngineError: a run of this ``run_id`` was cancelled and does not end.
        """
        from rankzero.submit import drivers
        from rankzero.submit.prepare import prepare

        request = self._for(train)._request()
        run, started = prepare(request, train, args, kwargs, detached=True)
        return drivers.start(run, request) if started else RunHandle.attach(run.directory)

    def owned(
        self, train: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[RunHandle[Any]]:
        """Opens a run that ends with the block, whatever ends the block, and with this process; `run` uses it.

        Args:
            train: As for `run`.
            args: Positional arguments of the function, or the script's command line.
            kwargs: Keyword arguments of the function.

        Returns:
            A context manager that yields the handle, to be followed until the run has ended.

        Raises:
            InvalidJobError: the job was rejected before anything started; raised on entering the block.
        """
        from rankzero.submit.owned import open_owned

        return open_owned(self._for(train)._request(), train, args, kwargs)

    def durable(
        self,
        train: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        caller: PipelineTry,
        log: Any,
        identity: Identity | None = None,
    ) -> AbstractContextManager[durable.Opened]:
        """Opens the run of a pipeline step's training: a new one, or that of an earlier try.

        The orchestrator packages use it; `rankzero.submit.durable.open_durable` describes it.

        Args:
            train: As for `run`.
            args: Positional arguments of the function, or the script's command line.
            kwargs: Keyword arguments of the function.
            caller: The step's facts about its orchestrator.
            log: The step's logger.
            identity: The result of `identity`, if it was computed already.

        Raises:
            InvalidJobError: this launcher has no ``run_id``; on entering the block, for the reasons of `submit`.
        """
        from rankzero.submit.durable import open_durable

        if self.run_id is None:
            raise InvalidJobError("a step finds its run by the run_id: give Launcher(run_id=...)")
        # Every try of the step finds the run by the step's name and store, whatever name a trainer has.
        named = self._for(train).options(run_id=self.run_id, store=self.store)
        return open_durable(replace(named._request(), identity=identity), train, args, kwargs, caller, log)

    def identity(self, train: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Identity:
        """Returns the identity of a training: its code, its arguments, the number of ranks.

        Args:
            train: As for `run`.
            args: Positional arguments of the function, or the script's command line.
            kwargs: Keyword arguments of the function.

        Returns:
            The identity, equal in every process: its ``digest`` identifies the training, its ``parts`` show the
            differences from another one.

        Raises:
            InvalidJobError: ``train`` names no script or function.
        """
        return self._for(train)._request().identity_of(train, args, kwargs)

    def _for(self, train: Any) -> Launcher:
        """Returns this launcher with the ``launch_options`` of a compatibility layer's trainer."""
        options = getattr(train, "launch_options", None)
        return self.options(**options()) if callable(options) else self

    def _world(self) -> jobs.WorldSize:
        if isinstance(self.num_processes, (int, tuple)):
            return self.num_processes
        found = self._engine().num_processes(self.processes_per_task, use_gpu=self.use_gpu)
        if found is None:
            raise InvalidJobError(
                'num_processes="auto" needs an engine that says how many places it has (LocalEngine(), local[N], '
                "spark.executor.instances): give a number, or the smallest and the largest, such as (2, 8)"
            )
        return found

    def _request(self) -> Request:
        from rankzero.submit import datasets, trackers
        from rankzero.submit.prepare import Request

        if self.restart_on and not self.max_restarts:
            logger.warning("restart_on=%r restarts nothing, since max_restarts is 0", self.restart_on)
        world = self._world()
        least, most = jobs.world_bounds(world)
        template = Job(
            run_id=self.run_id or "",
            name="",
            num_processes=most,
            min_processes=least if isinstance(world, tuple) else None,
            processes_per_task=self.processes_per_task,
            cpus_per_process=self.cpus_per_process,
            use_gpu=self.use_gpu,
            backend=self.backend,
            timeout=self.timeout,
            start_timeout=self.start_timeout,
            engine={},
            hang_timeout=self.hang_timeout,
            orphan_timeout=self.orphan_timeout,
            max_restarts=self.max_restarts,
            max_preemptions=self.max_restarts if self.max_preemptions is None else self.max_preemptions,
            stop_grace=self.stop_grace,
            exit_timeout=self.exit_timeout,
            ports=list(self.ports) if self.ports else None,
            checkpoints=asdict(self.checkpoints),
            warm_start=self.warm_start,
            encrypt=self.encrypt,
            labels=jobs.check_strings("labels", self.labels),
            prices=prices_from_environment(),
        )
        env = jobs.check_strings("env", self.env)
        engine = self._engine()
        return Request(
            engine,
            self._root(),
            template,
            self.num_processes,
            env,
            self.code_version,
            restart_on=self.restart_on,
            sources=datasets.check(self.dataset),
            code=self._code(),
            trackers=trackers.pack(self.trackers, engine),
        )

    def _code(self) -> UserCode:
        from rankzero.submit.user_code import UserCode

        working_dir = None if self.working_dir is None else os.path.expanduser(os.fspath(self.working_dir))
        py_files = tuple(os.path.expanduser(os.fspath(path)) for path in self.py_files)
        return UserCode(working_dir, py_files, tuple(self.excludes))

    def _engine(self) -> Engine:
        from rankzero.engines.base import Engine
        from rankzero.engines.local import LocalEngine

        engine = LocalEngine() if self.engine is None else self.engine
        if not isinstance(engine, Engine):
            raise InvalidJobError(
                f"engine is {engine!r}; give LocalEngine(), SparkEngine(...) or SparkConnectEngine(...)"
            )
        return engine

    def _root(self) -> str:
        return store.normalize(os.fspath(self.store or os.environ.get(STORE_VARIABLE) or DEFAULT_STORE))
