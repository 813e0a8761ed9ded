"""Collectives that reduce nothing, on tensors, by name; synchronous, asynchronous and differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rankzero.compat.horovod.torch.allreduce import Sum, allreduce
from rankzero.compat.horovod.torch.messages import Meta
from rankzero.compat.horovod.torch.pending import Key, Pending, begin, checked, issue, key_of, part_of, synchronize
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
    """Begins `allgather`."""
    return begin(_issue_allgather(tensor, key_of("allgather", name, process_set), process_set))


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, group: ProcessSet) -> Any:
        pending = _issue_allgather(tensor, key_of("allgather", name, group), group)
        ctx.rows, ctx.name, ctx.group = len(tensor), name, group
        return synchronize(pending)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        name = None if ctx.name is None else f"{ctx.name}.gradient"
        total = allreduce(gradient, name=name, op=Sum, process_set=ctx.group)
        rows = allgather(torch.tensor([ctx.rows]), None if name is None else f"{name}.rows", ctx.group).tolist()
        start = sum(rows[: ctx.group.rank()])
        return total[start : start + ctx.rows], None, None


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensors of all ranks along the first dimension, in which they may differ; differentiable."""
    found: torch.Tensor = _Allgather.apply(tensor, name, process_set)  # type: ignore[no-untyped-call]
    return found


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """`allgather` of several tensors."""
    key = key_of("grouped_allgather", name, process_set)
    found: list[torch.Tensor] = synchronize(
        [_issue_allgather(tensor, part_of(key, index), process_set) for index, tensor in enumerate(tensors)]
    )
    return found


def _issue_broadcast(tensor: torch.Tensor, root_rank: int, name: str | None, group: ProcessSet) -> Pending:
    """Issues a broadcast into the tensor."""
    if root_rank not in group.ranks:
        raise ValueError(f"root_rank is {root_rank}; the ranks are {group.ranks}")
    root = group.ranks.index(root_rank)
    meta = Meta("broadcast", str(checked(tensor).dtype), tuple(tensor.shape), root=root, device=tensor.device.type)
    return issue(key_of("broadcast", name, group), meta, tensor, group, lambda _: tensor)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Pending:
    """Begins a broadcast into the tensor."""
    return begin(_issue_broadcast(tensor, root_rank, name, process_set))


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Pending:
    """Begins a broadcast into a new tensor."""
    return broadcast_async_(checked(tensor).detach().clone(), root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensor of ``root_rank``, in place."""
    found: torch.Tensor = synchronize(_issue_broadcast(tensor, root_rank, name, process_set))
    return found


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root: int, name: str | None, group: ProcessSet) -> Any:
        ctx.root, ctx.name, ctx.group = root, name, group
        return broadcast_(tensor.detach().clone(), root, name, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        name = None if ctx.name is None else f"{ctx.name}.gradient"
        total = allreduce(gradient, name=name, op=Sum, process_set=ctx.group)
        is_root = global_process_set.rank() == ctx.root
        return (total if is_root else torch.zeros_like(total)), None, None, None


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensor of ``root_rank``, on every rank; differentiable."""
    found: torch.Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
    return found


def _issue_alltoall(tensor: torch.Tensor, splits: Splits, name: str | None, group: ProcessSet) -> Pending:
    """Issues it; the result is rows, and how many came from each rank."""
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
    """Begins `alltoall`."""
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
        What came from every rank; with ``splits`` also how many rows from each.
    """
    found: Any = _Alltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    return found[0] if splits is None else found


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every rank is here."""
    synchronize(issue(key_of("barrier", None, process_set), Meta("barrier"), torch.empty(0), process_set))


def join(device: int = -1) -> int:
    """Says that this rank has no more data: it gives zeros to the others' reductions until all have joined.

    Returns:
        The rank that came last.
    """
    return global_process_set.coordinator.join()
