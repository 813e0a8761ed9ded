"""Executes the operations on which the ranks have agreed, with torch.distributed."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rankzero.compat.horovod.torch.messages import Meta, Request

LARGE = 1 << 20
"""Bytes from which a tensor is reduced alone, since copying it into a fused buffer would take longer than a message."""

FUSION_LIMIT = 64 << 20
"""Bytes of smaller tensors that are reduced together."""

AVERAGE, SUM, MIN, MAX, PRODUCT = "Average", "Sum", "Min", "Max", "Product"

_REDUCE = {
    AVERAGE: dist.ReduceOp.SUM,
    SUM: dist.ReduceOp.SUM,
    MIN: dist.ReduceOp.MIN,
    MAX: dist.ReduceOp.MAX,
    PRODUCT: dist.ReduceOp.PRODUCT,
}


_WIDER = {torch.int16: torch.int32}
"""Types that torch cannot reduce, each with the wider type in which it is reduced."""


class Group(Protocol):
    """The ranks that execute an operation."""

    ranks: list[int]
    rank: int

    @property
    def size(self) -> int:
        """Returns the number of ranks."""
        ...

    def process_group(self, device: torch.device) -> Any:
        """Returns torch's process group for tensors on a device."""
        ...


def neutral(meta: Meta) -> torch.Tensor:
    """Returns the zeros that a rank that has joined adds to a sum or an average; an empty tensor for a barrier."""
    if not meta.dtype:
        return torch.empty(0, device="cpu")
    return torch.zeros(meta.shape, dtype=meta.torch_dtype, device=meta.device)


_TWO: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    AVERAGE: torch.add,
    SUM: torch.add,
    MIN: torch.minimum,
    MAX: torch.maximum,
    PRODUCT: torch.mul,
}


def reduce_inline(meta: Meta, request: Request, tensors: Sequence[torch.Tensor]) -> None:
    """Reduces tiny tensors that every rank has received, in the same order on all ranks."""
    tensors = [tensor.to(_WIDER.get(tensor.dtype, tensor.dtype)) for tensor in tensors]
    if meta.before != 1.0:
        tensors = [scaled(tensor, meta.before) for tensor in tensors]
    total = functools.reduce(_TWO[meta.op], tensors)
    request.tensor.copy_(_after(total, meta, len(tensors)))
    request.handle.finish(request.tensor)


def allreduce(group: Group, batch: Sequence[tuple[Meta, Request]]) -> None:
    """Reduces large tensors in place and small ones of one kind fused; all reductions run concurrently."""
    under_way = [_begin(group, meta, requests) for meta, requests in _fused(batch)]
    for finish in under_way:
        finish()


def _fused(batch: Sequence[tuple[Meta, Request]]) -> Iterator[tuple[Meta, list[Request]]]:
    """Yields the reductions to fuse. All ranks yield the same, since only facts that all have decide."""
    kinds: dict[Any, list[Request]] = {}
    sizes: Counter[Any] = Counter()
    for meta, request in batch:
        size = request.tensor.nbytes
        if size >= LARGE:
            yield meta, [request]
            continue
        kind = meta.dtype, meta.op, meta.before, meta.after, meta.device
        together = kinds.setdefault(kind, [])
        if sizes[kind] + size > FUSION_LIMIT:
            yield together[0].meta, together
            kinds[kind] = together = []
            sizes[kind] = 0
        together.append(request)
        sizes[kind] += size
    for together in kinds.values():
        yield together[0].meta, together


def _begin(group: Group, meta: Meta, requests: Sequence[Request]) -> Callable[[], None]:
    """Starts a reduction, and returns a function that waits for its end."""
    tensors = [request.tensor for request in requests]
    is_one = len(tensors) == 1 and tensors[0].is_contiguous()
    flat = tensors[0].view(-1) if is_one else torch.cat([tensor.reshape(-1) for tensor in tensors])
    flat = flat.to(_WIDER.get(flat.dtype, flat.dtype))
    if meta.before != 1.0:
        flat.copy_(scaled(flat, meta.before))
    work = None
    if group.size > 1:
        work = dist.all_reduce(flat, _REDUCE[meta.op], group=group.process_group(flat.device), async_op=True)

    def finish() -> None:
        if work is not None:
            work.wait()
        total = _after(flat, meta, group.size)
        if not is_one or total.data_ptr() != tensors[0].data_ptr():
            for tensor, part in zip(tensors, torch.split(total, [tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(part.view(tensor.shape))
        for request in requests:
            request.handle.finish(request.tensor)

    return finish


def _after(total: torch.Tensor, meta: Meta, size: int) -> torch.Tensor:
    if meta.op == AVERAGE and size > 1:
        # Averages of integers are truncated, as in Horovod.
        total = total.div_(size) if total.is_floating_point() or total.is_complex() else _cut(total, size)
    return scaled(total, meta.after) if meta.after != 1.0 else total


def _cut(total: torch.Tensor, size: int) -> torch.Tensor:
    return torch.div(total, size, rounding_mode="trunc")


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Returns a tensor times a factor, in the tensor's type. Integers are multiplied in float64, as in Horovod."""
    is_real = tensor.is_floating_point() or tensor.is_complex()
    return ((tensor if is_real else tensor.double()) * factor).to(tensor.dtype)


def run(group: Group, meta: Meta, request: Request) -> None:
    """Executes an operation that is not a reduction."""
    if meta.kind == "barrier":
        request.handle.finish(request.tensor)
    elif meta.kind == "broadcast":
        request.handle.finish(_broadcast(group, meta, request.tensor))
    elif meta.kind == "allgather":
        request.handle.finish(_allgather(group, request.tensor))
    else:
        request.handle.finish(_alltoall(group, request.tensor, request.splits or []))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a tensor as bytes, so that types that torch cannot send are sent, too."""
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # `view` fails for a single element with an arbitrary stride.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def _row_bytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def _broadcast(group: Group, meta: Meta, tensor: torch.Tensor) -> torch.Tensor:
    if group.size > 1:
        data = _bytes(tensor)
        dist.broadcast(data, group.ranks[meta.root], group=group.process_group(data.device))
        if data.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(data.view(tensor.dtype).view(tensor.shape))
    return tensor


def _counts(group: Group, counts: Sequence[int], device: torch.device) -> list[list[int]]:
    """Returns every rank's numbers, by rank."""
    mine = torch.tensor(counts, dtype=torch.int64, device=device)
    found = [torch.empty_like(mine) for _ in range(group.size)]
    dist.all_gather(found, mine, group=group.process_group(device))
    return [part.tolist() for part in found]


def _allgather(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the concatenated tensors of all ranks, whose first dimensions may differ."""
    if group.size == 1:
        return tensor.detach().clone()
    rows = [count for [count] in _counts(group, [len(tensor)], tensor.device)]
    sizes = [count * _row_bytes(tensor) for count in rows]
    mine = _bytes(tensor)
    if len(mine) < max(sizes):
        mine = torch.cat([mine, mine.new_zeros(max(sizes) - len(mine))])
    found = [torch.empty_like(mine) for _ in sizes]
    if max(sizes):
        dist.all_gather(found, mine, group=group.process_group(mine.device))
    whole = torch.cat([part[:size] for part, size in zip(found, sizes, strict=True)])
    return whole.view(tensor.dtype).view(sum(rows), *tensor.shape[1:])


def _alltoall(group: Group, tensor: torch.Tensor, splits: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sends rows to every rank; returns the rows from every rank, and how many came from each."""
    received = [counts[group.rank] for counts in _counts(group, splits, tensor.device)] if group.size > 1 else splits
    output = tensor.new_empty((sum(received), *tensor.shape[1:]))
    if group.size == 1:
        output.copy_(tensor.detach())
    else:
        row, mine = _row_bytes(tensor), _bytes(tensor)
        dist.all_to_all_single(
            _bytes(output), mine, [count * row for count in received], [count * row for count in splits],
            group=group.process_group(mine.device),
        )  # fmt: skip
    return output, torch.tensor(received, dtype=torch.int32, device="cpu")
