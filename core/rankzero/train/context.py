"""The running worker as the user's code sees it."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rankzero.texts import encodable
from rankzero.train.tables import RankTables
from rankzero.values.plain import MAX_BITS

if TYPE_CHECKING:
    import torch

    from rankzero.train.checkpoint import Checkpoint
    from rankzero.train.parts import Parts
    from rankzero.train.writer import CheckpointWriter

logger = logging.getLogger(__name__)

REPORT_LIMIT = 1 << 20
"""Bytes of the metrics of one report as JSON."""

STORAGE = "RANKZERO_STORAGE"
"""Variable that names a local directory for the checkpoints of a script that is started by hand. Without it nothing is
kept, so that no forgotten checkpoint changes what a script does."""

RANK_PROCESS = "RANKZERO_RANK_PROCESS"
"""Variable with the process id of the rank in which, or below which, a process runs the user's function or script."""

MetricValue = bool | int | float | str


@dataclass(frozen=True)
class TrainContext:
    """Who this worker is.

    Attributes:
        rank: Global rank, ``0 <= rank < world_size``.
        world_size: Number of workers of the run.
        local_rank: Index of this worker within its task; its GPU is the device of that number.
        local_world_size: Workers in this task.
        node_rank: Index of the task, in rank order.
        run_id: Name of the run.
        attempt: Number of this attempt of the run, from 0; under ``torchrun`` its restart count.
        use_gpu: Whether this worker owns a GPU.
        backend: ``"nccl"`` (on Intel's GPUs ``"xccl"``), ``"gloo"`` or None, as resolved from the launcher's.
        storage_path: The run directory, where this host sees it; outside of a run ``$RANKZERO_STORAGE``; else None.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    run_id: str = "no-run"
    attempt: int = 0
    use_gpu: bool = False
    backend: str | None = None
    storage_path: str | None = None

    @property
    def num_nodes(self) -> int:
        """Number of tasks, each with ``local_world_size`` ranks: what other frameworks call nodes."""
        return self.world_size // self.local_world_size

    @property
    def device(self) -> torch.device:
        """The device of this worker: its GPU if the job asked for GPUs, else the CPU.

        Raises:
            RuntimeError: the job asked for GPUs, but torch in this worker cannot use them.
        """
        import torch

        if not self.use_gpu:
            return torch.device("cpu")
        kind = accelerator()
        if kind is None:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            raise RuntimeError(
                f"use_gpu=True and this task was given the GPUs {visible!r}, but torch "
                f"{torch.__version__} cannot use CUDA here: install a CUDA build of torch and a driver"
            )
        return torch.device(kind, self.local_rank)


def accelerator() -> str | None:
    """The type of the devices that torch can use here: ``"cuda"`` (ROCm, too), ``"xpu"``, ``"mps"``; None for none."""
    import torch

    if not hasattr(torch, "accelerator"):
        # Before torch 2.6.
        return "cuda" if torch.cuda.is_available() else None
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if found is None else str(found.type)


_BACKENDS: dict[str | None, str] = {"cuda": "nccl", "xpu": "xccl"}


@dataclass
class _Session:
    """What the worker process installs before it calls the user's code."""

    context: TrainContext
    pid: int = field(default_factory=os.getpid, kw_only=True)
    send_report: Callable[[str], None] | None = None
    writer: CheckpointWriter | None = None
    result: object = None
    progress: int = 0
    checkpoints: int = 0
    at_return: list[Callable[[], object]] = field(default_factory=list)
    datasets: str | None = None
    scratch: str | None = None
    parts: Parts | None = None
    shards: dict[str, Any] = field(default_factory=dict)
    tables: RankTables = field(default_factory=RankTables)
    resumed: bool = False

    def __post_init__(self) -> None:
        # A result must not hold rows of calls that raised.
        self.at_return.append(self.tables.remove_refused)

    @functools.cached_property
    def directory(self) -> str:
        """The scratch directory of the task; outside of a run one of this process, which is removed at its exit."""
        if self.scratch is None:
            self._own_directory = tempfile.TemporaryDirectory(prefix="rankzero-rank-", ignore_cleanup_errors=True)
            return self._own_directory.name
        return self.scratch

    def count_progress(self) -> int:
        """How far this rank is; writing or reading a checkpoint is progress, however long it takes."""
        if self.writer and self.writer.busy:
            self.progress += 1
        return self.progress + self.checkpoints

    @property
    def carried_tables(self) -> set[str]:
        """Tables with rows of before the checkpoint that this attempt started from."""
        return self.writer.carried if self.writer else set()

    def load_cursor_tables(self, state: Mapping[str, Any]) -> None:
        """Notes that this rank continues from a cursor, and which of its tables may lack rows of ranks other than 0."""
        self.resumed = True
        last = self.writer.last if self.writer else None
        whole = last and (last.sharded or last.world_size == 1)
        self.tables.load_cursor(state, self.carried_tables if whole else set())


_session: _Session | None = None


def current() -> _Session:
    """This process as a worker; outside of a run as ``torchrun`` describes it. For `rankzero.train` alone."""
    global _session
    if _session is None:
        context = _from_environment()
        _session = _Session(context, writer=_standalone_writer(context))
    return _session


def own(call: str) -> _Session:
    """Returns this process as a worker, for calls that only the worker itself may make.

    Args:
        call: The function that the user has called.

    Raises:
        RuntimeError: this is a process that the worker has started, such as one of a DataLoader.
    """
    session = current()
    rank = os.environ.get(RANK_PROCESS)
    processes = sys.modules.get("multiprocessing.process")
    is_spawned = bool(rank and processes and processes.parent_process() and session.send_report is None)
    if is_spawned or (session.send_report is not None and session.pid != os.getpid()):
        raise RuntimeError(
            f"rankzero.train.{call} was called in process {os.getpid()}, which rank {session.context.rank} (process "
            f"{rank or session.pid}) has started: only the rank itself may call it. Return the value to the rank, "
            "for example in a DataLoader's batch, and call it there"
        )
    return session


def _standalone_writer(context: TrainContext) -> CheckpointWriter | None:
    """Who keeps the checkpoints outside of a run; None: nobody."""
    if context.storage_path is None:
        return None
    from rankzero.train import standalone

    return standalone.open_writer(context.storage_path, STORAGE)


def _from_environment() -> TrainContext:
    """The world outside of a run: as ``torchrun`` describes it, else one rank."""

    def number(name: str, default: int) -> int:
        return int(os.environ.get(name, default))

    try:
        kind = accelerator()
    except ImportError:
        kind = None
    return TrainContext(
        rank=number("RANK", 0),
        world_size=number("WORLD_SIZE", 1),
        local_rank=number("LOCAL_RANK", 0),
        local_world_size=number("LOCAL_WORLD_SIZE", 1),
        node_rank=number("GROUP_RANK", 0),
        run_id=os.environ.get("TORCHELASTIC_RUN_ID", "no-run"),
        attempt=number("TORCHELASTIC_RESTART_COUNT", 0),
        use_gpu=kind is not None,
        backend=_BACKENDS.get(kind, "gloo"),
        # Several ranks without a driver have nobody who would give them all the same checkpoint.
        storage_path=os.environ.get(STORAGE) or None if number("WORLD_SIZE", 1) == 1 else None,
    )


def install(
    context: TrainContext,
    send_report: Callable[[str], None],
    writer: CheckpointWriter,
    parts: Parts,
    datasets: str | None,
    scratch: str,
) -> _Session:
    """Makes this process a worker of a run. Called by the worker, not by users.

    Args:
        context: Who it is.
        send_report: Takes the metrics of a report as JSON.
        writer: Of checkpoints.
        parts: Its ways to the run directory.
        datasets: Path of the file that describes the datasets of the run; None if there are none.
        scratch: Directory of this task.
    """
    global _session
    _session = _Session(context, send_report, writer, datasets=datasets, scratch=scratch, parts=parts)
    return _session


def get_context() -> TrainContext:
    """The context of this worker; outside of a run that of ``torchrun``, or a world of one rank.

    Example:
        >>> import rankzero.train as rt
        >>> rt.get_context().world_size
        1
    """
    return current().context


def report(metrics: Mapping[str, Any], checkpoint: object = None, *, sharded: bool = False) -> None:
    """Reports metrics of this rank, and optionally a state to go on from. Counts as progress for ``hang_timeout``.

    Outside of a run rank 0 prints the metrics. A checkpoint is kept by a world of one, in the directory that the
    environment variable ``RANKZERO_STORAGE`` names, and else by nobody.

    Never waits for other ranks. Of a checkpoint it takes a copy in memory, which is written and committed while
    training goes on; the next one waits until this one is written. When all parts are there it becomes the one that
    `get_checkpoint` returns and a restart begins with; until then, and if anything fails, the one before it stays.
    Rows that this rank has written (`write_rows`) belong to it, too: a restart begins with them.

    Args:
        metrics: Name to value. Numbers, strings, and one-element tensors or arrays. An integer of more than 2048 bits
            is kept as its hexadecimal text.
        checkpoint: A directory (copied), or a dict of tensors and plain values. Rank 0's is kept; the other
            ranks' are ignored, unless it is sharded: a dict that holds DTensors (FSDP2) always is.
        sharded: The checkpoint consists of one part of every rank, each of which must call this.

    Raises:
        TypeError: a name is not a string, a value is neither a scalar nor convertible to one, or the checkpoint is
            neither a directory nor a dict.
        RuntimeError: this is not the rank, but a process that the rank has started.
        ValueError: sharded and whole checkpoints in one run, a whole one where other ranks than 0 have written rows,
            or metrics of more than 1 MiB as JSON.
        ResultError: the checkpoint, or the one before it, cannot be written here (a full disk, a value that cannot be
            pickled).

    Example:
        >>> import rankzero.train as rt
        >>> rt.report({"loss": 0.5})
        report 1: loss=0.5
        >>> rt.report({"loss": 0.4}, checkpoint={"model": {}, "epoch": 1})
        report 2: loss=0.4
    """
    values = {_name(name): _scalar(name, value) for name, value in metrics.items()}
    now = time.time()
    row = json.dumps([values, now], separators=(",", ":"))
    if len(row) > REPORT_LIMIT:
        raise ValueError(
            f"the metrics of one report take {len(row)} bytes as JSON, the limit is {REPORT_LIMIT}: "
            "report numbers and short strings; return what is large, or put it into the checkpoint"
        )
    session = own("report")
    session.progress += 1
    if session.send_report is None:
        _show(session, values)
    else:
        session.send_report(row)
    if checkpoint is not None and session.writer is not None:
        session.writer.write(checkpoint, values, now, session.tables.seal(), sharded=sharded)
        session.checkpoints += 1


def await_checkpoint() -> None:
    """Waits until the last checkpoint that this rank has reported is committed, or is lost with a line in the log."""
    session = own("await_checkpoint")
    if session.writer is not None:
        session.writer.await_settled()


def get_checkpoint() -> Checkpoint | None:
    """The last committed checkpoint of this run, of this attempt or an earlier one; None if there is none.

    Every rank of a new attempt gets the same one. A rank that has reported none in this attempt (of whole checkpoints,
    which are rank 0's, all other ranks) keeps the one that it started from.

    Example:
        >>> import rankzero.train as rt
        >>> checkpoint = rt.get_checkpoint()
        >>> first_epoch = checkpoint.load()["epoch"] + 1 if checkpoint else 0
    """
    session = current()
    session.resumed = True
    return session.writer.last if session.writer else None


def set_result(value: object) -> None:
    """Sets the value that this run returns, if this is rank 0. How a script returns one.

    The last call wins. In a function, just return the value; a value other than None that the
    function returns takes precedence.

    Raises:
        RuntimeError: this is not the rank, but a process that the rank has started.
    """
    own("set_result").result = value


def at_return(function: Callable[[], object]) -> None:
    """Calls a function when the training function has returned, before its value is stored. Not after a failure."""
    own("at_return").at_return.append(function)


def count_progress() -> None:
    """Counts a step of this rank for ``hang_timeout``."""
    current().progress += 1


def _show(session: _Session, values: Mapping[str, MetricValue]) -> None:
    """A report outside of a run: a line of rank 0."""
    if session.context.rank == 0:
        shown = (f"{name}={value:.6g}" if type(value) is float else f"{name}={value}" for name, value in values.items())
        print(f"report {session.progress}:", *shown, flush=True)


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"metric names are strings, not {name!r}")
    return encodable(name)


def _scalar(name: str, value: Any) -> MetricValue:
    item = getattr(value, "item", None)
    scalar = item() if callable(item) else value
    if isinstance(scalar, int) and scalar.bit_length() > MAX_BITS:
        # Python makes no decimal digits of it, and reads none.
        return hex(scalar)
    if isinstance(scalar, str):
        return encodable(scalar)
    if isinstance(scalar, (bool, int, float)):
        return scalar
    raise TypeError(f"metric {name!r} is a {type(value).__name__}; report numbers or strings")
