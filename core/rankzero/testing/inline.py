"""`run_inline`: a training function with rank 0 in this thread, where breakpoints work and coverage counts."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rankzero.errors import InvalidJobError
from rankzero.testing.ranks import Ranks
from rankzero.train import standalone
from rankzero.train.tables import RankTables
from rankzero.values.ref import ResultRef, map_refs

if TYPE_CHECKING:
    from rankzero.train.checkpoint import Checkpoint


@dataclass(frozen=True)
class InlineRun:
    """Result of a training function under `run_inline`.

    Attributes:
        value: The object that rank 0 returned, or gave to `rankzero.train.set_result`.
        values: Return values of the ranks, by rank.
        metrics: A row for each report of a rank: ``rank``, ``time`` and the metrics.
        checkpoint: Last checkpoint that rank 0 reported, as a new attempt would get it; None if there is none.
    """

    value: Any
    values: list[Any]
    metrics: list[dict[str, Any]]
    checkpoint: Checkpoint | None = field(default=None, repr=False)
    _home: Any = field(default=None, repr=False, compare=False)


def run_inline(
    train: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    world_size: int = 1,
    checkpoint: object = None,
    env: Mapping[str, str] | None = None,
) -> InlineRun:
    """Calls a training function as ranks of a run do, with rank 0 in this thread.

    Nothing is pickled for rank 0, and its exceptions are raised unchanged, so breakpoints work and coverage counts its
    lines. The other ranks are processes of this machine, which connect to rank 0 by the same environment variables as
    in a run, on CPUs, with gloo. The environment of this process and `rankzero.train` are restored afterwards.
    When another rank fails, rank 0's wait for it in torch.distributed ends, and the remaining ranks are killed.

    Args:
        train: The function.
        args: Positional arguments of the function.
        kwargs: Keyword arguments of the function.
        world_size: Number of ranks. With more than one the function must be picklable by cloudpickle.
        checkpoint: Checkpoint that `rankzero.train.get_checkpoint` returns: a directory or a dict, as for
            `rankzero.train.report`.
        env: Environment variables for the ranks.

    Returns:
        An `InlineRun`.

    Raises:
        InvalidJobError: ``world_size`` is not a positive number.
        WorkerFailedError: another rank failed first.
        Exception: the exception that rank 0 raised.

    Example:
        >>> import torch
        >>> import rankzero.train as rt
        >>> from rankzero.testing import run_inline
        >>> def train(lr: float) -> float:
        ...     rt.report({"loss": lr}, checkpoint={"weight": torch.ones(1)})
        ...     return lr * 2
        >>> run = run_inline(train, (0.5,))
        >>> run.value, run.metrics[0]["loss"], run.checkpoint.load()["weight"]
        (1.0, 0.5, tensor([1.]))
    """
    if type(world_size) is not int or world_size < 1:
        raise InvalidJobError(f"world_size is {world_size!r}; it must be a positive integer")
    import torch.distributed as dist

    args, named = map_refs((args, dict(kwargs or {})), ResultRef.load)
    home = tempfile.TemporaryDirectory(prefix="rankzero-inline-")
    if checkpoint is not None:
        writer = standalone.open_writer(home.name, "checkpoint")
        writer.write(checkpoint, {}, time.time(), RankTables(), sharded=False)
        writer.finish()
    had_group = dist.is_initialized()
    ranks = Ranks(home.name, world_size, dict(env or {}), attempt=int(checkpoint is not None))
    try:
        value = ranks.call(train, args, named)
        values = [value, *ranks.finish()]
    except BaseException:
        if not (had_group or dist.is_initialized()):
            _count_groups_anew()
        raise
    finally:
        if dist.is_initialized() and not had_group:
            dist.destroy_process_group()
        ranks.close()
    metrics = sorted(ranks.metrics, key=lambda row: row["time"])
    return InlineRun(value, values, metrics, ranks.writer.last, home)


def _count_groups_anew() -> None:
    """A group that could not be made has had a number, and the next one would wait under another than the others'."""
    import torch.distributed as dist

    alone: Any = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
    dist.destroy_process_group()
