"""Reductions of which each rank gets its share of rows: synchronous, asynchronous and differentiable.

torch's gloo executes an allreduce faster than a reducescatter, so a rank takes its rows of an allreduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rankzero.compat.horovod.torch.allreduce import checked_op, compressed_by, issue_reductions
from rankzero.compat.horovod.torch.compression import Compression
from rankzero.compat.horovod.torch.execute import AVERAGE, SUM
from rankzero.compat.horovod.torch.ops import grouped_allgather
from rankzero.compat.horovod.torch.pending import Pending, begin, checked, synchronize
from rankzero.compat.horovod.torch.world import ProcessSet, global_process_set


def _issue(
    name: str | None, tensors: Sequence[torch.Tensor], op: str, before: float, after: float, group: ProcessSet
) -> list[Pending]:
    """Issues reductions, each of which results in this rank's rows."""
    op = checked_op(op)
    if op not in (AVERAGE, SUM):
        raise ValueError(f"op is {op!r}; reducescatter takes hvd.Average or hvd.Sum")
    if any(not checked(tensor).dim() for tensor in tensors):
        raise ValueError("reducescatter takes tensors with a first dimension, not a scalar")
    copies = [tensor.detach().clone() for tensor in tensors]
    found = issue_reductions("reducescatter", name, copies, op, before, after, group)
    for pending, copy in zip(found, copies, strict=True):
        pending.finish = lambda _, whole=copy: _share(whole, group)  # type: ignore[misc]
    return found


def _share(whole: torch.Tensor, group: ProcessSet) -> torch.Tensor:
    rows, more = divmod(len(whole), group.size())
    mine = group.rank()
    start = mine * rows + min(mine, more)
    return whole[start : start + rows + (mine < more)].clone()


class _Reducescatter(torch.autograd.Function):
    """Differentiable reducescatter. The gathered gradient of a sum is times the number of ranks, as in Horovod."""

    @staticmethod
    def forward(ctx: Any, name: str | None, options: tuple[Any, ...], *tensors: torch.Tensor) -> Any:
        ctx.name, ctx.options = name, options
        return tuple(synchronize(_issue(name, tensors, *options)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        op, before, after, group = ctx.options
        factor = before * after * (group.size() if op == SUM else 1)
        name = None if ctx.name is None else f"{ctx.name}.gradient"
        return None, None, *grouped_allgather([gradient * factor for gradient in gradients], name, group)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: str = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Pending]:
    """Starts a `grouped_reducescatter`; `synchronize` returns its results."""
    return begin(_issue(name, tensors, op, prescale_factor, postscale_factor, process_set))


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: str = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Returns this rank's rows of the reductions of several tensors, executed together; differentiable."""
    options = op, prescale_factor, postscale_factor, process_set
    return compressed_by(
        compression,
        tensors,
        lambda them: _Reducescatter.apply(name, options, *them),  # type: ignore[no-untyped-call]
    )


def reducescatter_async(tensor: torch.Tensor, name: str | None = None, *args: Any, **kwargs: Any) -> Pending:
    """Starts a `reducescatter`; arguments as for `grouped_reducescatter_async`."""
    (found,) = grouped_reducescatter_async([tensor], name, *args, **kwargs)
    return found


def reducescatter(tensor: torch.Tensor, name: str | None = None, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns this rank's rows of the reduction of every rank's tensor; differentiable.

    If the rows do not divide evenly, the first ranks get one more. Arguments as for `grouped_reducescatter`.
    """
    (found,) = grouped_reducescatter([tensor], name, *args, **kwargs)
    return found
