"""`Launcher`: the front door. `run` returns rank 0's value, `submit` returns a handle."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from typing import IO, TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from rankzero import job as jobs
from rankzero import store
from rankzero.checkpoint import CheckpointConfig
from rankzero.directory import Position, RunDirectory
from rankzero.errors import InvalidJobError, RunNotFoundError
from rankzero.job import Job
from rankzero.liveness import this_process
from rankzero.policy import STOP_GRACE
from rankzero.run import CANCEL_TIMEOUT, RunHandle

if TYPE_CHECKING:
    from rankzero.engines.base import Engine
    from rankzero.payload import Payload

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)

STORE_VARIABLE = "RANKZERO_STORE"
DEFAULT_STORE = "~/.rankzero/runs"


@dataclass(frozen=True)
class Launcher:
    """How training functions and scripts are run. All configuration is here.

    Attributes:
        num_processes: World size, the number of ranks.
        engine: Where the ranks run: `LocalEngine()` (None means that), `SparkEngine(...)`.
        use_gpu: Give every rank one GPU. Without enough GPUs the job is refused.
        processes_per_task: Ranks in one Spark task. Must divide ``num_processes``.
        backend: Of the process group: ``"auto"`` (nccl with GPUs, else gloo), ``"nccl"``, ``"gloo"``,
            or None if the training function decides. Shown to it as ``get_context().backend``.
        env: Environment variables for the ranks.
        timeout: Seconds the run may take, all attempts together, once every rank has started; None for no bound.
        start_timeout: Seconds until every rank of an attempt must have started.
        hang_timeout: Seconds after which an attempt in which no rank progresses ends with a `HangError`; None
            for no bound. Progress is a call of `rankzero.train.report` or a step of a torch optimizer.
        orphan_timeout: Seconds after which a submitted run that nobody follows cancels itself; None lets it go
            on. `RunHandle.wait`, ``result``, ``logs(follow=True)`` and ``events(follow=True)`` follow.
        max_restarts: New attempts, from the last checkpoint, after a rank was killed by a signal, a host or
            executor was lost, a hang, or a `RetryableError`. Other exceptions of the function end the run.
        store: Root of the run directories, a path or an fsspec URL. None: ``$RANKZERO_STORE``, else
            ``~/.rankzero/runs``.
        run_id: Name of the run; None makes one up. A run id that lives is not started twice; one that failed or
            was cancelled goes on from its last checkpoint; see `submit` for one that succeeded.
        dataset: Must be None: not part of this version.
        max_preemptions: New attempts after the cluster took a place back (SIGTERM from outside); None for as
            many as ``max_restarts``, counted apart.
        stop_grace: Seconds between SIGTERM and SIGKILL when a run ends early: time to save a checkpoint.
        ports: First and last port on which the driver and rank 0 may listen, for firewalls; None lets the
            system choose. The connections of a collective library are not rankzero's to place.
        checkpoints: Which checkpoints are kept.
        warm_start: Fork ranks from a process that has torch loaded: one for each executor, which it does not
            outlive. False starts every rank as a new interpreter.

        labels: Words of yours about the run, kept in its ``job.json``: see `RunHandle.labels`.

    Raises:
        InvalidJobError: a value is wrong; says which and what to do.

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

    num_processes: int = 1
    _: KW_ONLY
    engine: Engine | None = None
    use_gpu: bool = False
    processes_per_task: int = 1
    backend: str | None = "auto"
    env: Mapping[str, str] | None = field(default=None, repr=False)
    timeout: float | None = None
    start_timeout: float = 600.0
    hang_timeout: float | None = None
    orphan_timeout: float | None = None
    max_restarts: int = 0
    store: str | os.PathLike[str] | None = None
    run_id: str | None = None
    dataset: Any = None
    max_preemptions: int | None = None
    stop_grace: float = STOP_GRACE
    ports: tuple[int, int] | None = None
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    warm_start: bool = True
    labels: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        jobs.check_counts(self.num_processes, self.processes_per_task)
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
        jobs.check_limit("max_restarts", self.max_restarts)
        jobs.check_limit("max_preemptions", self.max_preemptions, optional=True)
        jobs.check_ports(self.ports)
        jobs.check_flag("warm_start", self.warm_start)
        jobs.check_strings("labels", self.labels)
        if not isinstance(self.checkpoints, CheckpointConfig):
            raise InvalidJobError(f"checkpoints is {self.checkpoints!r}; give a CheckpointConfig")
        if self.dataset is not None:
            raise InvalidJobError(f"dataset={self.dataset!r} is not supported by this version of rankzero")

    def options(self, **changes: Any) -> Launcher:
        """A copy with changed fields. Raises InvalidJobError for a field that does not exist."""
        unknown = set(changes) - set(self.__dataclass_fields__)
        if unknown:
            raise InvalidJobError(f"Launcher has no option {', '.join(sorted(unknown))}")
        return replace(self, **changes)

    def find(self) -> RunHandle[Any] | None:
        """The run that ``run_id`` names in this store; None if there is none yet. Starts nothing.

        Raises:
            InvalidJobError: this launcher has no ``run_id``, or the store cannot be read.
        """
        if self.run_id is None:
            raise InvalidJobError("find() looks for the run that run_id names: give Launcher(run_id=...)")
        directory = _directory(self, self.run_id)
        try:
            return RunHandle.attach(directory)
        except RunNotFoundError:
            return None
        except OSError as error:
            raise InvalidJobError(f"the store cannot be read: {directory}: {error}") from error

    def take_up(self) -> RunHandle[Any] | None:
        """The run to which `submit` would attach: it lives, or its result waits. None if `submit` would start one."""
        from rankzero import submission

        handle = self.find()
        return handle if handle and submission.is_waiting(RunDirectory(handle.directory)) else None

    @overload
    def run(self, train: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def run(self, train: str | os.PathLike[str], /, *args: Any, **kwargs: Any) -> Any: ...
    def run(self, train: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Runs and returns rank 0's value; the ranks' output goes to standard output meanwhile.

        The run ends with this call: an interrupt, or the death of this process, cancels it. Called again with the
        same ``run_id`` after such an end it goes on from the last checkpoint; after a success it trains again.

        Args:
            train: A callable, ``"path/to/script.py"``, or ``"package.module:function"``.
            args: Positional arguments of the function, or the script's command line.
            kwargs: Keyword arguments of the function.

        Returns:
            What rank 0 returned; for a script, what it gave to ``rankzero.train.set_result``.

        Raises:
            InvalidJobError: refused before anything started.
            WorkerFailedError: a rank failed; describes the first cause.
            RankZeroError: other subclasses for slots, time, cancellation, the result.
        """
        handle = start_owned(self, print_line, train, args, kwargs)
        value = handle.result()
        try:
            handle.mark_delivered()
        except Exception:
            # The value is here; the next run of this id may get it again instead of training.
            logger.warning("run %s could not be marked as delivered", handle.id, exc_info=True)
        return value

    @overload
    def submit(self, train: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> RunHandle[R]: ...
    @overload
    def submit(self, train: str | os.PathLike[str], /, *args: Any, **kwargs: Any) -> RunHandle[Any]: ...
    def submit(self, train: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Starts a run that belongs to its run directory and outlives this process.

        Takes the arguments of `run`. Submitting one ``run_id`` again starts nothing while the run lives, and gives
        the handle of the run and its result when it succeeded; after `RunHandle.mark_delivered` it trains from
        scratch. A run that failed or was cancelled goes on from its last checkpoint, with the function and
        arguments given now.

        Returns:
            A `RunHandle`; any other process gets one with ``RunHandle.attach(handle.directory)``.

        Raises:
            InvalidJobError: refused before anything started.
            EngineError: a run of this ``run_id`` was cancelled and does not end.
        """
        run, started = _prepare(self, _engine_of(self), train, args, kwargs, detached=True)
        return RunHandle(run.directory, _start_driver(run, None) if started else None)


def start_owned(
    launcher: Launcher,
    on_line: Callable[[str], None],
    train: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    on_start: Callable[[RunHandle[Any]], None] | None = None,
) -> RunHandle[Any]:
    """Runs to the end and returns the handle; what `Launcher.run` and the orchestrators stand on.

    Args:
        launcher: The configuration.
        on_line: Gets every line of every rank, with its ``[rank]`` prefix, in this thread.
        train: As for `Launcher.run`.
        args: As for `Launcher.run`.
        kwargs: As for `Launcher.run`.
        on_start: Gets the handle once the run directory is there, before the run is followed, so
            that a signal handler or another thread can cancel the run meanwhile.

    Returns:
        The handle of a run that has ended, however it ended: ask it for the result.

    Raises:
        InvalidJobError: refused before anything started.
        BaseException: whatever interrupted this thread, after the run was ended.
    """
    with open_owned(launcher, train, args, kwargs) as (handle, since):
        if on_start:
            on_start(handle)
        for line in handle.lines(since, follow=True, prefix=True):
            on_line(line)
    return handle


@contextlib.contextmanager
def open_owned(
    launcher: Launcher, train: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[RunHandle[Any], dict[int, Position]]]:
    """A run that ends with the block, however that ends, and with this process.

    Args:
        launcher: The configuration.
        train: As for `Launcher.run`.
        args: As for `Launcher.run`.
        kwargs: As for `Launcher.run`.

    Yields:
        The handle, to be followed until the run has ended, and where each rank's lines of earlier submissions end.

    Raises:
        InvalidJobError: refused before anything started.
    """
    engine = _engine_of(launcher)
    patience = launcher.stop_grace + CANCEL_TIMEOUT

    run, started = _prepare(
        launcher, engine, train, args, kwargs, detached=engine.prefers_own_process, owner=this_process()
    )
    since = RunHandle[Any](run.directory).ends()
    if not started:
        handle = RunHandle[Any](run.directory)
        if not handle.status().final:
            raise InvalidJobError(
                f"run_id {handle.id!r} is running: attach to it with RunHandle.attach({run.directory!r}), or choose "
                "another run_id"
            )
        # It succeeded, and whoever waited for it died before it could hand the result on.
        yield handle, since
        return
    driver = _process_driver(run, patience) if engine.prefers_own_process else _thread_driver(run, engine, patience)
    with driver as handle:
        yield handle, since


@contextlib.contextmanager
def _process_driver(run: RunDirectory, patience: float) -> Iterator[RunHandle[Any]]:
    """A driver in a process of its own, which ends its run when this process, or the block, does."""
    theirs, ours = os.pipe()
    handle: RunHandle[Any] | None = None
    try:
        try:
            handle = RunHandle(run.directory, _start_driver(run, theirs))
        finally:
            os.close(theirs)
        yield handle
    finally:
        # After an interrupt this is what ends the run, at once, wherever its directory lies.
        os.close(ours)
        if handle:
            handle.wait(patience)


@contextlib.contextmanager
def _thread_driver(run: RunDirectory, engine: Engine, patience: float) -> Iterator[RunHandle[Any]]:
    """A driver in a thread of this process, which ends its run when the block does."""
    from rankzero.driver import Driver, DriverThread

    thread = DriverThread(Driver(run, engine))
    thread.start()
    try:
        yield RunHandle(run.directory, thread)
    except BaseException as interrupt:
        thread.driver.inbox.interrupt(
            f"the caller was interrupted by {type(interrupt).__name__}: {interrupt}".rstrip(": ")
        )
        raise
    finally:
        thread.await_end(patience)
    if thread.error:
        raise thread.error


def print_line(line: str) -> None:
    """Writes a line of a rank to standard output."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    sys.stdout.write(line.encode(encoding, "replace").decode(encoding) + "\n")
    sys.stdout.flush()


def _engine_of(launcher: Launcher) -> Engine:
    from rankzero.engines.base import Engine
    from rankzero.engines.local import LocalEngine

    engine = LocalEngine() if launcher.engine is None else launcher.engine
    if not isinstance(engine, Engine):
        raise InvalidJobError(f"engine is {engine!r}; give LocalEngine() or SparkEngine(...)")
    return engine


def _prepare(
    launcher: Launcher,
    engine: Engine,
    train: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    detached: bool,
    owner: dict[str, Any] | None = None,
) -> tuple[RunDirectory, bool]:
    """Checks everything, then writes the run directory. Nothing has started when this raises.

    Returns:
        The run, and whether the caller must start its driver (else somebody did).
    """
    from rankzero import payload, submission
    from rankzero.envelope import digest_of

    if detached and not engine.can_detach:
        raise InvalidJobError(
            "a run that outlives this process cannot use this process's SparkSession: "
            "give SparkEngine(master=...) to submit(), or use run()"
        )
    parts = payload.build(train, args, kwargs)
    spec, private = engine.to_spec()
    restarts = launcher.max_restarts
    job = Job(
        run_id=launcher.run_id or jobs.new_run_id(parts.name),
        name=parts.name,
        num_processes=launcher.num_processes,
        processes_per_task=launcher.processes_per_task,
        use_gpu=launcher.use_gpu,
        backend=launcher.backend,
        timeout=launcher.timeout,
        start_timeout=launcher.start_timeout,
        engine=spec,
        hang_timeout=launcher.hang_timeout,
        orphan_timeout=launcher.orphan_timeout,
        max_restarts=restarts,
        max_preemptions=restarts if launcher.max_preemptions is None else launcher.max_preemptions,
        stop_grace=launcher.stop_grace,
        ports=list(launcher.ports) if launcher.ports else None,
        checkpoints=asdict(launcher.checkpoints),
        warm_start=launcher.warm_start,
        labels=jobs.check_strings("labels", launcher.labels),
        owner=owner,
    )
    engine.check(job)
    files = {"payload.pkl": parts.data}
    if parts.modules is not None:
        files["modules.zip"] = [parts.modules]
    run = RunDirectory(_directory(launcher, job.run_id))
    arguments = _describe_arguments(parts)

    def make_job(number: int, first_attempt: int, fresh_since: int) -> Job:
        described = {
            name: {
                "location": run.submission_path(number, name),
                "size": sum(map(len, data)),
                "absolute": False,
                "digest": digest_of(data),
            }
            for name, data in files.items()
        }
        files_of_job = {**described, **arguments}
        return replace(job, files=files_of_job, submission=number, first_attempt=first_attempt, fresh_since=fresh_since)

    env = jobs.check_strings("env", launcher.env)
    return run, submission.submit(run, make_job, {"env": env, "engine": private}, files)


def _directory(launcher: Launcher, run_id: str) -> str:
    root = os.fspath(launcher.store or os.environ.get(STORE_VARIABLE) or DEFAULT_STORE)
    return store.join(store.normalize(root), run_id)


def _describe_arguments(parts: Payload) -> dict[str, dict[str, Any]]:
    """Files that arguments refer to. Raises InvalidJobError if one is gone."""
    described: dict[str, dict[str, Any]] = {}
    for number, ref in enumerate(parts.refs):
        # A reference to an object store is opened there by the workers themselves.
        if not store.is_url(ref.uri):
            if not (os.path.isfile(ref.uri) and os.path.getsize(ref.uri) == ref.size):
                raise InvalidJobError(f"the argument {ref.uri} is gone or not the {ref.size} bytes that were stored")
            facts = {"location": ref.uri, "size": ref.size, "sha256": ref.sha256, "absolute": True}
            described[f"ref-{number}"] = {**facts, "uri": ref.uri}
    return described


class DriverProcess(subprocess.Popen[bytes]):
    """A driver in a process of its own."""

    def await_end(self, timeout: float) -> None:
        """Returns when it has ended, or after so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout)


# Drivers that this process started. A submitted driver outlives its handle; keeping it here lets
# poll() collect its exit status, whoever holds the handle.
_drivers: list[DriverProcess] = []
_drivers_lock = threading.Lock()


def _start_driver(run: RunDirectory, owner: int | None) -> DriverProcess:
    """Starts a detached driver in its own session, with its output in ``driver.log``."""
    import rankzero

    package_root = os.path.dirname(os.path.dirname(os.path.abspath(rankzero.__file__)))
    # As `python -m rankzero.driver`, also where rankzero is found through this process's path only.
    program = "import sys; sys.path.append(sys.argv.pop(1)); from rankzero.driver import main; main()"
    submission = run.job().submission
    command = [sys.executable, "-c", program, package_root, run.directory, "--submission", str(submission)]
    if owner is not None:
        command += ["--owner", str(owner)]
    with _open_driver_log(run) as log:
        driver = DriverProcess(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[owner] if owner is not None else [],
            start_new_session=True,
        )
    with _drivers_lock:
        _drivers[:] = [other for other in _drivers if other.poll() is None] + [driver]
    return driver


def _open_driver_log(run: RunDirectory) -> IO[bytes]:
    if run.is_remote:
        return open(os.devnull, "wb")
    return open(run.path("driver.log"), "ab")
