"""Collectives of tensors other than allreduce, matched by name: synchronous, asynchronous and differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from rankzero.compat.horovod.torch.allreduce import (
    allreduce,
    checked_op,
    compressed_by,
    grouped_allreduce,
    issue_reductions,
)
from rankzero.compat.horovod.torch.compression import Compression
from rankzero.compat.horovod.torch.execute import AVERAGE, SUM
from rankzero.compat.horovod.torch.messages import Meta
from rankzero.compat.horovod.torch.pending import (
    Key,
    Pending,
    begin,
    checked,
    issue,
    issue_in_place,
    key_of,
    keys_of,
    synchronize,
)
from rankzero.compat.horovod.torch.world import ProcessSet, global_process_set

Splits = torch.Tensor | Sequence[int] | None


def _issue_allgather(tensor: torch.Tensor, key: Key, group: ProcessSet) -> Pending:
    if not checked(tensor).dim():
        raise ValueError("allgather takes tensors with a first dimension, not a scalar")
    meta = Meta("allgather", str(tensor.dtype), tuple(tensor.shape[1:]), device=tensor.device.type)
    return issue(key, meta, tensor, group)


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Pending:
    """Starts an `allgather`; `synchronize` returns its result."""
    return begin(_issue_allgather(tensor, key_of("allgather", name, process_set), process_set))


def _issue_allgathers(kind: str, name: str | None, tensors: Sequence[torch.Tensor], group: ProcessSet) -> list[Pending]:
    keys = keys_of(kind, name, group, len(tensors))
    return [_issue_allgather(tensor, key, group) for tensor, key in zip(tensors, keys, strict=True)]


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Pending]:
    """Starts a `grouped_allgather`; `synchronize` returns its results."""
    return begin(_issue_allgathers("grouped_allgather", name, tensors, process_set))


class _Allgather(torch.autograd.Function):
    """Differentiable allgather of tensors. The gradient is this rank's rows of the average, as in Horovod."""

    @staticmethod
    def forward(ctx: Any, kind: str, name: str | None, group: ProcessSet, *tensors: torch.Tensor) -> Any:
        pending = _issue_allgathers(kind, name, tensors, group)
        ctx.rows, ctx.name, ctx.group = [len(tensor) for tensor in tensors], name, group
        return tuple(synchronize(pending))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        name = None if ctx.name is None else f"{ctx.name}.gradient"
        averages = grouped_allreduce(gradients, name=name, process_set=ctx.group)
        rows = allgather(torch.tensor([ctx.rows], device="cpu"), None if name is None else f"{name}.rows", ctx.group)
        starts = rows[: ctx.group.rank()].sum(0).tolist()
        parts = [whole[start : start + own] for whole, start, own in zip(averages, starts, ctx.rows, strict=True)]
        return None, None, None, *parts


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Returns the `allgather` of several tensors, executed together; differentiable."""
    return list(_Allgather.apply("grouped_allgather", name, process_set, *tensors))  # type: ignore[no-untyped-call]


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Returns the tensors of all ranks, concatenated in the first dimension, which may differ; differentiable."""
    (found,) = _Allgather.apply("allgather", name, process_set, tensor)  # type: ignore[no-untyped-call]
    return cast(torch.Tensor, found)


def _issue_broadcast(tensor: torch.Tensor, root_rank: int, name: str | None, group: ProcessSet) -> Pending:
    """Issues a broadcast into the tensor."""
    if root_rank not in group.ranks:
        raise ValueError(f"root_rank is {root_rank}; the ranks are {group.ranks}")
    root = group.ranks.index(root_rank)
    meta = Meta("broadcast", str(checked(tensor).dtype), tuple(tensor.shape), root=root, device=tensor.device.type)
    return issue_in_place(key_of("broadcast", name, group), meta, tensor, group)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Pending:
    """Starts a broadcast into the tensor; `synchronize` returns it."""
    return begin(_issue_broadcast(tensor, root_rank, name, process_set))


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Pending:
    """Starts a broadcast; `synchronize` returns a new tensor."""
    return broadcast_async_(checked(tensor).detach().clone(), root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Copies the tensor of ``root_rank`` into the given tensor, and returns it."""
    found: torch.Tensor = synchronize(_issue_broadcast(tensor, root_rank, name, process_set))
    return found


class _Broadcast(torch.autograd.Function):
    """Differentiable broadcast. The gradient is the average on the root, as in Horovod, and zero on other ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root: int, name: str | None, group: ProcessSet) -> Any:
        ctx.root, ctx.name, ctx.group = root, name, group
        return broadcast_(tensor.detach().clone(), root, name, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        name = None if ctx.name is None else f"{ctx.name}.gradient"
        average = allreduce(gradient, name=name, process_set=ctx.group)
        is_root = global_process_set.rank() == ctx.root
        return (average if is_root else torch.zeros_like(average)), None, None, None


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Returns the tensor of ``root_rank`` on every rank; differentiable."""
    found: torch.Tensor = _Broadcast.apply(checked(tensor), root_rank, name, process_set)  # type: ignore[no-untyped-call]
    return found


def _issue_alltoall(tensor: torch.Tensor, splits: Splits, name: str | None, group: ProcessSet) -> Pending:
    """Issues an alltoall, whose result is the rows, and how many came from each rank."""
    size, rows = group.size(), len(checked(tensor))
    if splits is None and rows % size:
        raise ValueError(f"alltoall of {rows} rows to {size} ranks needs splits")
    counts = [rows // size] * size if splits is None else [int(count) for count in splits]
    if len(counts) != size or sum(counts) != rows or min(counts, default=0) < 0:
        raise ValueError(f"splits are {counts}; {size} counts are needed that add up to {rows} rows")
    meta = Meta("alltoall", str(tensor.dtype), tuple(tensor.shape[1:]), device=tensor.device.type)
    return issue(key_of("alltoall", name, group), meta, tensor, group, None, counts)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """Starts an `alltoall`; `synchronize` returns its result."""
    pending = _issue_alltoall(tensor, splits, name, process_set)
    if splits is None:
        pending.finish = _rows
    return begin(pending)


def _rows(result: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return result[0]


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Splits, name: str | None, group: ProcessSet) -> Any:
        rows, received = synchronize(_issue_alltoall(tensor, splits, name, group))
        ctx.received, ctx.name, ctx.group = received.tolist(), name, group
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
        name = None if ctx.name is None else f"{ctx.name}.gradient"
        back, _ = alltoall(gradient, ctx.received, name, ctx.group)
        return back, None, None, None


def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows to every rank; differentiable.

    Returns:
        The rows from every rank; with ``splits`` also how many came from each.
    """
    found: Any = _Alltoall.apply(checked(tensor), splits, name, process_set)  # type: ignore[no-untyped-call]
    return found[0] if splits is None else found


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every rank of the set has called it."""
    synchronize(issue(key_of("barrier", None, process_set), Meta("barrier"), torch.empty(0, device="cpu"), process_set))


def join(device: int = -1) -> int:
    """Announces that this rank has no more data; it adds zeros to other ranks' reductions until all have joined.

    Returns:
        The rank that joined last.
    """
    return global_process_set.coordinator.join()


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: str = AVERAGE, process_set: ProcessSet = global_process_set
) -> Pending:
    """Begins a reduction of a sparse tensor, whose rows travel; `synchronize`, or a call, gives a sparse tensor."""
    if op not in (AVERAGE, SUM):
        raise ValueError(f"a sparse gradient can be averaged or summed, not reduced by {op}")
    tensor = tensor.coalesce()
    indices = allgather_async(tensor._indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values(), f"{name}.values", process_set)

    def finish(found: torch.Tensor) -> torch.Tensor:
        rows = synchronize(indices)
        scale = found / process_set.size() if op == AVERAGE else found
        return torch.sparse_coo_tensor(rows.t(), scale, tensor.shape, check_invariants=False).coalesce()

    return Pending(values.handle, process_set, finish)


def empty_sparse(like: torch.Tensor, sparse_dims: int) -> torch.Tensor:
    """A sparse tensor without any row, of the shape and type of another."""
    indices = torch.empty((sparse_dims, 0), dtype=torch.int64, device=like.device)
    values = like.new_empty((0, *like.shape[sparse_dims:]))
    return torch.sparse_coo_tensor(indices, values, like.shape, check_invariants=False)


def _issue_reducescatter(
    name: str | None, tensors: Sequence[torch.Tensor], op: str, before: float, after: float, group: ProcessSet
) -> list[Pending]:
    """Issues reductions, each of which results in this rank's rows.

    torch's gloo executes an allreduce faster than a reducescatter, so a rank takes its rows of an allreduce.
    """
    op = checked_op(op)
    if op not in (AVERAGE, SUM):
        raise ValueError(f"op is {op!r}; reducescatter takes hvd.Average or hvd.Sum")
    if any(not checked(tensor).dim() for tensor in tensors):
        raise ValueError("reducescatter takes tensors with a first dimension, not a scalar")
    copies = [tensor.detach().clone() for tensor in tensors]
    found = issue_reductions("reducescatter", name, copies, op, before, after, group)
    for pending, copy in zip(found, copies, strict=True):
        pending.finish = lambda _, whole=copy: _rows_of_rank(whole, group)  # type: ignore[misc]
    return found


def _rows_of_rank(whole: torch.Tensor, group: ProcessSet) -> torch.Tensor:
    rows, more = divmod(len(whole), group.size())
    mine = group.rank()
    start = mine * rows + min(mine, more)
    return whole[start : start + rows + (mine < more)].clone()


class _Reducescatter(torch.autograd.Function):
    """Differentiable reducescatter. The gathered gradient of a sum is times the number of ranks, as in Horovod."""

    @staticmethod
    def forward(ctx: Any, name: str | None, options: tuple[Any, ...], *tensors: torch.Tensor) -> Any:
        ctx.name, ctx.options = name, options
        return tuple(synchronize(_issue_reducescatter(name, tensors, *options)))

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
    return begin(_issue_reducescatter(name, tensors, op, prescale_factor, postscale_factor, process_set))


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
