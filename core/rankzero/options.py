"""`Options`: the table of the options of a run, each with its type, default, kind and help.

`rankzero.Launcher` inherits the table. The command line, Airflow's operator and decorator, Dagster's resource and the
reference are derived from `TABLE`; ``make reference`` writes the files that type checkers need. So a new option is an
entry here, and the code that uses it.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from rankzero import kinds
from rankzero.bounds import EXIT_TIMEOUT, STOP_GRACE
from rankzero.errors import InvalidJobError
from rankzero.job import CheckpointConfig, world_bounds
from rankzero.kinds import Kind, NumProcesses, RestartOn

if TYPE_CHECKING:
    from rankzero.engines.base import Engine
    from rankzero.tracking.tracker import Tracker

T = TypeVar("T")


def option(default: T, kind: Kind, *, shown: bool = True, **facts: Any) -> T:
    """Returns an entry of the table; ``repr`` leaves out values that may hold secrets, which are not ``shown``."""
    return field(default=default, repr=shown, metadata={"kind": kind, **facts})


def _check_dataset(_: str, value: Any) -> Any:
    importlib.import_module("rankzero.submit.datasets").check(value)
    return value


def _check_trackers(name: str, value: Any) -> Any:
    kind = importlib.import_module("rankzero.tracking.tracker").Tracker
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, kind) for each in value):
        raise InvalidJobError(f"{name} is {value!r}; give a list of objects of subclasses of rankzero.tracking.Tracker")
    return value


def _check_engine(name: str, value: Any) -> Any:
    if not isinstance(value, importlib.import_module("rankzero.engines.base").Engine):
        raise InvalidJobError(f"{name} is {value!r}; give LocalEngine(), SparkEngine(...) or SparkConnectEngine(...)")
    return value


_CHECKPOINTS = kinds.valued(lambda value: isinstance(value, CheckpointConfig), "give a CheckpointConfig")


@dataclass(frozen=True)
class Options:
    """All options of a run.

    Attributes:
        num_processes: World size, the number of ranks. ``"auto"``: one rank for each slot that the engine reports: a
            GPU with ``use_gpu``, else a core of this machine or a task slot of the cluster. A pair such as ``(2, 8)``
            is elastic: each attempt starts with as many ranks as the cluster has slots.
        engine: The engine that runs the ranks: `LocalEngine()` (the default for None), `SparkEngine(...)`,
            `SparkConnectEngine(...)`.
        use_gpu: True assigns one GPU to each rank. Without enough GPUs the job is rejected.
        processes_per_task: Ranks in one Spark task. Must divide ``num_processes``.
        cpus_per_process: Cores of each rank, which also set its ``OMP_NUM_THREADS``, and on a cluster the cores of a
            task, in place of the session's ``spark.task.cpus``. None: the session decides.
        backend: Backend of the process group: ``"auto"`` (nccl with GPUs, else gloo), ``"nccl"``, ``"gloo"``, or None
            if the training function decides. The function reads it as ``get_context().backend``.
        env: Environment variables for the ranks.
        timeout: Seconds the run may take, all attempts together, once every rank has started; None for no limit.
        start_timeout: Seconds until every rank of an attempt must have started.
        hang_timeout: Seconds after which an attempt in which no rank progresses ends with a `HangError`; None for no
            limit. Progress is a call of `rankzero.train.report` or a step of a torch optimizer. Ranks that wait in a
            collective for ranks that have returned end with that error after 5 minutes in any case.
        orphan_timeout: Seconds without a follower after which a submitted run cancels itself; None lets it continue.
        max_restarts: New attempts, from the last checkpoint, after a rank was killed by a signal or exited without a
            word, a host or executor was lost, a hang, a `RetryableError`, or an exception that ``restart_on`` names.
            Other exceptions of the function, `SystemExit` too, end the run.
        restart_on: Exceptions of the function that count among ``max_restarts``: texts and classes, such as
            ``("CUDA error", ConnectionError)``, or a function that is called with the exception, in the rank that
            raised it, and returns True for another attempt. A text matches as a part of ``type: message``, or as the
            qualified name of a class of the exception.
        store: Root of the run directories, a path or an fsspec URL. None: ``$RANKZERO_STORE``, else
            ``~/.rankzero/runs``.
        run_id: Name of the run; None creates a random one. A live run is not started twice; one that failed or was
            cancelled resumes from its last checkpoint; see `submit` for one that succeeded.
        dataset: Data that ranks read by `rankzero.train.get_dataset_shard`: a Spark DataFrame, the path or URL of a
            Parquet, Delta or Arrow table, or with a Spark engine the name of a table or a query; or a dict of these by
            name. A single one has the name ``"train"``.
        max_preemptions: New attempts after the cluster took a slot back (SIGTERM from outside); None for as many as
            ``max_restarts``, counted separately.
        stop_grace: Seconds between SIGTERM and SIGKILL when a run ends early: time to save a checkpoint.
        exit_timeout: Seconds that a rank's exit handlers and non-daemon threads get once every rank has returned, for
            example to finish an upload. The rank's log names those that were cut off.
        ports: First and last port on which the driver and rank 0 may listen, for firewalls; None lets the system
            choose. The ports of a collective library's connections are not affected.
        checkpoints: Which checkpoints are kept.
        warm_start: True forks ranks from a zygote, a process with torch loaded, which later launches of this process,
            or of Spark's Python worker, use again. False starts every rank as a new interpreter.
        encrypt: True encrypts the connections between the run's driver and its agents, for arguments, results,
            checkpoints and lines that do not use the store. None: if Spark encrypts its own connections. Traffic
            between ranks is torch's, and is not encrypted.
        labels: Labels of the run, which are kept in its directory.
        code_version: Replaces the code in the identity of the training. None: the code counts by content, so that a run
            id whose function, script or modules have changed begins from scratch.
        working_dir: A directory that is shipped with the job: each rank starts in a copy of it, which is first on its
            search path. Hidden files, files named like a key or a password, and files that match a ``.rankzeroignore``
            there (in the format of .gitignore) are not shipped.
        py_files: Python files, zips, eggs, wheels and directories of packages to ship, for ranks to import. Modules
            that a function or script imports are shipped automatically; these are for imports that cannot be found.
        trackers: External systems that receive the run's events, such as ``[MLflow()]``: see
            `rankzero.tracking.Tracker`. A run never waits for a tracker, and never fails because of one.

    Raises:
        InvalidJobError: a value is wrong; the message names it and says what to do.
    """

    num_processes: NumProcesses = option(1, kinds.WORLD, late=True, flag="-n")
    _: KW_ONLY
    engine: Engine | None = option(None, Kind(_check_engine), of_step=False)
    use_gpu: bool = option(False, kinds.FLAG)
    processes_per_task: int = option(1, kinds.POSITIVE, late=True)
    cpus_per_process: int | None = option(None, kinds.POSITIVE)
    backend: str | None = option("auto", kinds.BACKEND)
    env: Mapping[str, str] | None = option(None, kinds.STRINGS, late=True, shown=False)
    timeout: float | None = option(None, kinds.SECONDS, late=True)
    start_timeout: float = option(600.0, kinds.SECONDS, late=True)
    hang_timeout: float | None = option(None, kinds.SECONDS, late=True)
    orphan_timeout: float | None = option(None, kinds.SECONDS)
    max_restarts: int = option(0, kinds.COUNT, late=True)
    restart_on: RestartOn = option((), kinds.RESTART_ON, late=True)
    store: str | os.PathLike[str] | None = option(None, kinds.LOCATION, late=True)
    run_id: str | None = option(None, kinds.RUN_ID, of_step=False)
    dataset: Any = option(None, Kind(_check_dataset, "TABLE", str), late=True)
    max_preemptions: int | None = option(None, kinds.COUNT)
    stop_grace: float = option(STOP_GRACE, kinds.SECONDS)
    exit_timeout: float = option(EXIT_TIMEOUT, kinds.SECONDS)
    ports: tuple[int, int] | None = option(None, kinds.PORTS)
    checkpoints: CheckpointConfig = option(CheckpointConfig(), _CHECKPOINTS)
    warm_start: bool = option(True, kinds.FLAG)
    encrypt: bool | None = option(None, kinds.FLAG)
    labels: Mapping[str, str] | None = option(None, kinds.STRINGS, of_step=False, flag="--label")
    code_version: str | None = option(None, kinds.TEXT)
    working_dir: str | os.PathLike[str] | None = option(None, kinds.PATH, late=True)
    py_files: Sequence[str | os.PathLike[str]] = option((), kinds.PATHS, late=True)
    trackers: Sequence[Tracker] = option((), Kind(_check_trackers), shown=False)

    def __post_init__(self) -> None:
        for each in TABLE.values():
            object.__setattr__(self, each.name, each.check(getattr(self, each.name)))
        if self.backend == "nccl" and not self.use_gpu:
            raise InvalidJobError('backend="nccl" needs use_gpu=True; on CPUs use "gloo" or "auto"', code="RZ-1002")
        for count in () if self.num_processes == kinds.AUTO else world_bounds(self.num_processes):
            if count % self.processes_per_task:
                raise InvalidJobError(
                    f"processes_per_task={self.processes_per_task} does not divide num_processes={count}: "
                    "every task runs the same number of workers"
                )
        if self.num_processes == kinds.AUTO and self.cpus_per_process is not None:
            raise InvalidJobError('num_processes="auto" does not know cpus_per_process: give the number of ranks')


@dataclass(frozen=True)
class Option:
    """An entry of the table: the facts about one option.

    Attributes:
        name: The name of the option.
        type: Its type as Python source, for signatures.
        help: Its entry in the docstring of `Options`; empty if Python has removed that.
        default: Its default; None is also a valid value where it is the default.
        kind: The kind of its values.
        late: True if a pipeline may give it as text that is rendered when the step runs.
        of_step: False if an orchestrator's integration decides about it, not the user's pipeline.
        flag: A second name on the command line.
    """

    name: str
    type: str
    help: str
    default: Any
    kind: Kind
    late: bool = False
    of_step: bool = True
    flag: str = ""

    @property
    def is_number(self) -> bool:
        """Returns True if a late text has to be read, since it stands for a number or a few of them."""
        return self.late and self.kind.read is not kinds.as_text

    def check(self, value: Any) -> Any:
        """Returns the value as rankzero uses it. Raises InvalidJobError for a wrong one."""
        return value if value is self.default else self.kind.check(self.name, value)


_HELP = dict(re.findall(r"(?m)^ {4}(\w+): (.+(?:\n {8}.+)*)", inspect.cleandoc(Options.__doc__ or "")))

TABLE = {
    each.name: Option(
        each.name, str(each.type), " ".join(_HELP.get(each.name, "").split()), each.default, **each.metadata
    )
    for each in fields(Options)
}
"""The options by name."""

HELP = "".join(f"        {each.name}: {each.help}\n" for each in TABLE.values())
"""The descriptions of all options, as the docstring of a class has those of its attributes."""


def step_options(late: str = "", **changes: Mapping[str, Any]) -> dict[str, Option]:
    """Returns the options that a pipeline gives, by name, as an integration has them.

    Args:
        late: A sentence that is added to the help of options that may be rendered late.
        changes: Attributes of `Option` by the name of an option, or ``more``, a sentence that is added to its help.
    """
    found = {}
    for each in TABLE.values():
        if each.of_step:
            facts = {"help": each.help, **changes.get(each.name, {})}
            sentences = facts.pop("help"), facts.pop("more", ""), late if each.late else ""
            found[each.name] = replace(each, help=" ".join(filter(None, sentences)), **facts)
    return found
