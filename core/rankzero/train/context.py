"""The state of the running rank that the functions of `rankzero.train` use."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from rankzero import bounds
from rankzero.errors import encodable

if TYPE_CHECKING:
    import torch

    from rankzero.train.checkpoint import Checkpoint
    from rankzero.train.parts import Parts
    from rankzero.train.writer import CheckpointWriter

REPORT_LIMIT = 1 << 20  # Most bytes that the metrics of one report take as JSON

PROGRESS_LINE_INTERVAL = bounds.scaled(5.0)  # Between two progress lines in a log

T = TypeVar("T")

RANK_PROCESS = "RANKZERO_RANK_PROCESS"
"""Environment variable: process id of the rank, set in the rank and in the processes that it starts."""


@dataclass(frozen=True)
class TrainContext:
    """The identity of this rank: its ranks and world sizes, its run and its attempt.

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
        storage_path: The run directory, if this host sees it; else None.
        labels: `Launcher.labels`; in a task of Airflow its names, and ``partition_key`` if the DAG run has one.
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
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def num_nodes(self) -> int:
        """Returns the number of tasks, each with ``local_world_size`` ranks. Other frameworks call them nodes."""
        return self.world_size // self.local_world_size

    @property
    def device(self) -> torch.device:
        """Returns the device of this worker: its GPU if the job asked for GPUs, else the CPU. Raises RuntimeError."""
        import torch

        kind = accelerator() if self.use_gpu else "cpu"
        if kind is None:
            raise RuntimeError("use_gpu=True, but torch cannot use CUDA here: install a CUDA build of it and a driver")
        return torch.device(kind, self.local_rank) if self.use_gpu else torch.device("cpu")


def accelerator() -> str | None:
    """Returns the type of the devices that torch can use: ``"cuda"`` (also ROCm), ``"xpu"``, ``"mps"``; else None."""
    import torch

    if not hasattr(torch, "accelerator"):
        # torch is older than 2.6.
        return "cuda" if torch.cuda.is_available() else None
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if found is None else str(found.type)


_BACKENDS: dict[str | None, str] = {"cuda": "nccl", "xpu": "xccl"}


@dataclass
class _Session:
    """State of a rank's process, which the worker installs before it calls the user's code."""

    context: TrainContext
    pid: int = field(default_factory=os.getpid, kw_only=True)
    send_report: Callable[[str], None] | None = None
    writer: CheckpointWriter | None = None
    result: object = None
    has_result: bool = False
    progress: int = 0
    checkpoints: int = 0
    at_return: list[Callable[[], object]] = field(default_factory=list)
    datasets: str | None = None
    scratch: str | None = None
    parts: Parts | None = None
    shards: dict[str, Any] = field(default_factory=dict)
    row_schemas: dict[str, Any] = field(default_factory=dict)
    row_files: itertools.count[int] = field(default_factory=itertools.count)
    resumed: bool = False

    @functools.cached_property
    def directory(self) -> str:
        """Returns the scratch directory of the task; outside of a run a temporary one of this process."""
        if self.scratch is None:
            self._own_directory = tempfile.TemporaryDirectory(prefix="rankzero-rank-", ignore_cleanup_errors=True)
            return self._own_directory.name
        return self.scratch

    def count_progress(self) -> int:
        """Returns a number that rises with each sign of progress, such as each call while a checkpoint is written."""
        if self.writer and self.writer.busy:
            self.progress += 1
        return self.progress + self.checkpoints

    def note_report(self) -> None:
        """Prints a line with the first report of a training that has not asked for the checkpoint to resume from."""
        offered = self.writer.last if self.writer and not self.resumed else None
        self.resumed = True
        if offered and self.context.rank == 0:
            # The function may have closed its output.
            with contextlib.suppress(OSError, ValueError):
                what = f"get_checkpoint() was not called, so nothing resumes from checkpoint {offered.id}"
                print(f"rankzero: {what}", flush=True)


_session: _Session | None = None


def current() -> _Session:
    """Returns the session of this process; outside of a run one from ``torchrun``'s environment variables."""
    global _session
    if _session is None:
        _session = _Session(_from_environment())
    return _session


def own(call: str) -> _Session:
    """Returns the session of this process, for a function (``call``) that only the rank itself may call.

    Raises:
        RuntimeError: this is a process that the rank has started, such as one of a DataLoader.
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


def _from_environment() -> TrainContext:
    """Returns the context outside of a run, from ``torchrun``'s environment variables; without them one rank."""
    names = {
        "rank": "RANK",
        "world_size": "WORLD_SIZE",
        "local_rank": "LOCAL_RANK",
        "local_world_size": "LOCAL_WORLD_SIZE",
        "node_rank": "GROUP_RANK",
        "attempt": "TORCHELASTIC_RESTART_COUNT",
    }
    numbers: Any = {field: int(os.environ[name]) for field, name in names.items() if name in os.environ}
    kind = None
    with contextlib.suppress(ImportError):
        kind = accelerator()
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "no-run")
    return TrainContext(run_id=run_id, use_gpu=kind is not None, backend=_BACKENDS.get(kind, "gloo"), **numbers)


def install(
    context: TrainContext,
    send_report: Callable[[str], None],
    writer: CheckpointWriter,
    parts: Parts,
    datasets: str | None,
    scratch: str,
) -> _Session:
    """Makes this process a worker of a run. Called by the worker, not by users."""
    global _session
    _session = _Session(context, send_report, writer, datasets=datasets, scratch=scratch, parts=parts)
    return _session


def get_context() -> TrainContext:
    """Returns the context of this worker; outside of a run ``torchrun``'s world, or a world of one rank."""
    return current().context


def report(metrics: Mapping[str, Any], checkpoint: object = None, *, sharded: bool = False) -> None:
    """Reports metrics of this rank, and optionally a checkpoint. Counts as progress for ``hang_timeout``.

    Outside of a run rank 0 prints the metrics, and no checkpoint is stored.

    The call never waits for other ranks. A thread writes a copy of the checkpoint while training continues; the next
    report with a checkpoint waits until this one is written. When all parts are stored, `get_checkpoint` returns the
    checkpoint, and a restart resumes from it. Until then, or if a part fails, the previous one is used.

    Args:
        metrics: Name to value. Numbers, strings, and one-element tensors or arrays.
        checkpoint: A directory (copied), or a dict of tensors and plain values. Rank 0's is kept; the other
            ranks' are ignored, unless it is sharded: a dict that holds DTensors (FSDP2) always is.
        sharded: Whether the checkpoint consists of one part of every rank. Every rank must then call this. A run in
            which rank 0 reports whole checkpoints and others sharded ones ends with a `ResultError`.

    Raises:
        TypeError: a name is not a string, a value is neither a scalar nor convertible to one, or the checkpoint is
            neither a directory nor a dict.
        RuntimeError: this process is not the rank, but one that the rank has started.
        ValueError: sharded and whole checkpoints in one run, or metrics of more than 1 MiB as JSON.
        ResultError: the checkpoint, or the one before it, cannot be pickled or written here.

    Example:
        >>> import rankzero.train as rt
        >>> rt.report({"loss": 0.5})
        report ...: loss=0.5
        >>> rt.report({"loss": 0.4}, checkpoint={"model": {}, "epoch": 1})
        report ...: loss=0.4
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics is {metrics!r:.100}; give a dict, such as report({{'loss': 0.5}})")
    if others := [name for name in metrics if not isinstance(name, str)]:
        raise TypeError(f"metric names are strings, not {others[0]!r}")
    values = {encodable(name): scalar(name, value) for name, value in metrics.items()}
    now = time.time()
    row = json.dumps([values, now], separators=(",", ":"))
    if len(row) > REPORT_LIMIT:
        raise ValueError(
            f"the metrics of one report take {len(row)} bytes as JSON, the limit is {REPORT_LIMIT}: "
            "report numbers and short strings; return large values, or put them into the checkpoint"
        )
    session = own("report")
    session.progress += 1
    session.note_report()
    if session.send_report is not None:
        session.send_report(row)
    elif session.context.rank == 0:
        shown = (f"{name}={value:.6g}" if type(value) is float else f"{name}={value}" for name, value in values.items())
        print(f"report {session.progress}:", *shown, flush=True)
    if checkpoint is not None and session.writer is not None:
        session.writer.write(checkpoint, values, now, sharded=sharded, has_result=session.has_result)
        session.checkpoints += 1


def scalar(name: str, value: Any) -> bool | int | float | str:
    """Returns the number or string of a metric. Raises TypeError for any other value."""
    item = getattr(value, "item", None)
    try:
        scalar = item() if callable(item) else value
    except (RuntimeError, TypeError, ValueError):
        raise TypeError(f"metric {name!r} is a {type(value).__name__} of several elements; report one number") from None
    if not isinstance(scalar, (bool, int, float, str)):
        raise TypeError(f"metric {name!r} is of type {type(value).__name__}; report numbers or strings")
    return encodable(scalar) if isinstance(scalar, str) else scalar


def await_checkpoint() -> None:
    """Waits until the last checkpoint that this rank has reported is committed or has failed, at most ten minutes.

    With whole checkpoints, every rank that has reported as often as rank 0 waits for the same one.
    """
    session = own("await_checkpoint")
    if session.writer is not None:
        session.writer.await_settled()


def get_checkpoint() -> Checkpoint | None:
    """Returns the last committed checkpoint of this run, of this attempt or an earlier one; None if there is none.

    Every rank of a new attempt gets the same checkpoint. A rank that has reported no checkpoint in this attempt keeps
    the one that it started from.

    Example:
        >>> import rankzero.train as rt
        >>> checkpoint = rt.get_checkpoint()
        >>> first_epoch = checkpoint.load()["epoch"] + 1 if checkpoint else 0
    """
    session = current()
    session.resumed = True
    return session.writer.last if session.writer else None


def set_result(value: object) -> None:
    """Sets the value that this run returns, if this is rank 0. A script returns a value with it.

    The last call wins. The value is copied: training may change the weights of the best epoch so far. A training
    function can return its value instead; a returned value other than None takes precedence.

    An attempt that resumes has to set the value again: put what it is made of into the checkpoint. If the attempt ends
    without a value that an earlier one had set, the run fails with a `ResultError` instead of returning None.

    Raises:
        RuntimeError: this process is not the rank, but one that the rank has started.
    """
    session = own("set_result")
    session.result = _copied(value) if session.context.rank == 0 else None
    session.has_result = session.context.rank == 0


def _copied(value: object) -> object:
    """Returns a copy of a value; the value itself if it is sharded, or cannot be pickled, which its commit reports."""
    from rankzero.values import pickled

    try:
        data = bytearray().join(pickled.pickled(value))
        return pickled.unpack(memoryview(data), pickled.Loader)
    except Exception:
        return value


def at_return(function: Callable[[], object]) -> None:
    """Registers a function that is called after the training function returns (not after a failure)."""
    own("at_return").at_return.append(function)


def progress(iterable: Iterable[T], desc: str = "", total: int | None = None) -> Iterator[T]:
    """Yields the items of an iterable, and shows the count, the rate and the time left on rank 0.

    It prints a line every five seconds. Each step counts as progress for ``hang_timeout``.

    Args:
        iterable: The items to iterate over.
        desc: Text at the beginning of the line.
        total: Number of items; None for ``len(iterable)`` if it has a length.

    Example:
        >>> import rankzero.train as rt
        >>> list(rt.progress(range(3), "epoch 1"))
        epoch 1: 3/3 (100%), ... it/s, 0:00:00 elapsed
        [0, 1, 2]
    """
    if total is None:
        # A loader of an endless data set has a length that raises.
        with contextlib.suppress(TypeError):
            total = len(iterable)  # type: ignore[arg-type]
    is_shown = current().context.rank == 0
    begin = shown = time.monotonic()
    count = 0
    for count, item in enumerate(iterable, 1):
        yield item
        current().progress += 1
        if is_shown and time.monotonic() - shown >= PROGRESS_LINE_INTERVAL():
            shown = time.monotonic()
            print(_line(desc, count, total, shown - begin), flush=True)
    if is_shown:
        print(_line(desc, count, total, time.monotonic() - begin), flush=True)


def _line(desc: str, count: int, total: int | None, passed: float) -> str:
    rate = count / passed if passed else 0.0
    speed = f"{rate:.1f} it/s" if rate >= 1 or not rate else f"{1 / rate:.1f} s/it"
    name = f"{desc}: " if desc else ""
    share = f"/{total} ({count / total:.0%})" if total else ""
    is_running = total is not None and rate and count < total
    seconds = (total - count) / rate if is_running else passed  # type: ignore[operator]
    return f"{name}{count}{share}, {speed}, {timedelta(seconds=round(seconds))} {'left' if is_running else 'elapsed'}"
