"""Collectives on tensors, by name; synchronous, asynchronous and differentiable."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from rankzero.compat.horovod.torch.compression import Compression
from rankzero.compat.horovod.torch.execute import AVERAGE, MAX, MIN, PRODUCT, SUM
from rankzero.compat.horovod.torch.messages import Handle, Meta, Request
from rankzero.compat.horovod.torch.world import ProcessSet, global_process_set

Average, Sum, Min, Max, Product = AVERAGE, SUM, MIN, MAX, PRODUCT
Adasum = "Adasum"

_counts: dict[str, Any] = {}


class _Pending:
    """An asynchronous operation, and what becomes of its result."""

    def __init__(self, handle: Handle, group: ProcessSet, finish: Any) -> None:
        self.handle = handle
        self.group = group
        self.finish = finish


def _named(kind: str, name: str | None, group: ProcessSet) -> str:
    """The name; without one the number of the call, which then counts on every rank."""
    if name is not None:
        return f"{kind}.{name}"
    key = f"{kind}.{group.process_set_id}"
    return f"{kind}.noname.{next(_counts.setdefault(key, itertools.count(1)))}"


def _checked_op(op: str | None, average: bool | None) -> str:
    if average is not None:
        if op is not None:
            raise ValueError("give op= or average=, not both")
        return AVERAGE if average else SUM
    if op == Adasum:
        raise NotImplementedError("op=hvd.Adasum is not supported: use op=hvd.Average, with the learning rate scaled")
    if op not in (None, AVERAGE, SUM, MIN, MAX, PRODUCT):
        raise ValueError(f"op is {op!r}; use hvd.Average, Sum, Min, Max or Product")
    return op or AVERAGE


def _issue(request: Request, group: ProcessSet) -> Handle:
    if not group.included():
        raise ValueError(f"rank {global_process_set.rank()} is no member of {group}")
    return group.coordinator.issue(request)


def _tensor(tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a collective takes a torch.Tensor, not a {type(tensor).__name__}")
    return tensor


def _apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


# -- allreduce ---------------------------------------------------------------------------------


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    drive: bool = True,
) -> _Pending:
    """Begins a reduction in place; `synchronize` gives the tensor."""
    op = _checked_op(op, average)
    dtype, shape = str(_tensor(tensor).dtype), tuple(tensor.shape)
    meta = Meta("allreduce", dtype, shape, op, 0, float(prescale_factor), float(postscale_factor), tensor.device.type)
    handle = _issue(Request(_named("allreduce", name, process_set), meta, tensor), process_set)
    if drive:
        process_set.coordinator.drive()
    return _Pending(handle, process_set, lambda result: tensor)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> _Pending:
    """Begins a reduction; `synchronize` gives a new tensor."""
    copy = _tensor(tensor).detach().clone()
    return allreduce_async_(copy, average, name, op, prescale_factor, postscale_factor, process_set)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *options: Any) -> Any:
        ctx.options = options
        name, op, before, after, group = options
        pending = allreduce_async_(tensor.detach().clone(), None, name, op, before, after, group, drive=False)
        return synchronize(pending)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        name, op, before, after, group = ctx.options
        name = None if name is None else f"{name}.gradient"
        return (allreduce(gradient, None, name, Compression.none, op, before, after, group), *[None] * 5)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The reduction of every rank's tensor, on every rank; differentiable.

    Args:
        tensor: Of the same type and shape on all ranks.
        average: Old name of ``op``.
        name: By which ranks find each other; None: the number of the call.
        compression: `Compression`: the type in which it travels.
        op: ``Average`` (None), ``Sum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor: Factor before the reduction.
        postscale_factor: Factor after it.
        process_set: The ranks that take part.

    Returns:
        A new tensor.

    Raises:
        MismatchError: type, shape or ``op`` differ between ranks; names them.
        StallError: another rank does not issue it.
        HorovodInternalError: another rank died.
    """
    op = _checked_op(op, average)
    compressed, context = compression.compress(_tensor(tensor))
    reduced: Any = _apply(_Allreduce, compressed, name, op, prescale_factor, postscale_factor, process_set)
    result: torch.Tensor = compression.decompress(reduced, context)
    return result


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """As `allreduce`, in place."""
    pending = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set, drive=False)
    result: torch.Tensor = synchronize(pending)
    return result


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[_Pending]:
    """Begins reductions in place; `synchronize` gives the tensors."""
    base = _named("grouped", name, process_set)
    found = [
        allreduce_async_(
            tensor, average, f"{base}.{index}", op, prescale_factor, postscale_factor, process_set, drive=False
        )
        for index, tensor in enumerate(tensors)
    ]
    process_set.coordinator.drive()
    return found


def grouped_allreduce_async(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[_Pending]:
    """As `grouped_allreduce_async_`, of copies."""
    return grouped_allreduce_async_([tensor.detach().clone() for tensor in tensors], *args, **kwargs)


def grouped_allreduce_(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Reductions in place."""
    found: list[torch.Tensor] = synchronize(grouped_allreduce_async_(tensors, *args, **kwargs))
    return found


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reductions of several tensors, together; arguments as for `allreduce`."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    pending = grouped_allreduce_async(
        [tensor for tensor, _ in pairs], average, name, op, prescale_factor, postscale_factor, process_set
    )
    reduced = synchronize(pending)
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)]


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: str = AVERAGE, process_set: ProcessSet = global_process_set
) -> _Pending:
    """Begins a reduction of a sparse tensor, whose rows travel; `synchronize` gives a sparse tensor."""
    if op not in (AVERAGE, SUM):
        raise ValueError(f"a sparse gradient can be averaged or summed, not reduced by {op}")
    tensor = tensor.coalesce()
    indices = allgather_async(tensor._indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values(), f"{name}.values", process_set)

    def finish(found: torch.Tensor) -> torch.Tensor:
        rows = synchronize(indices)
        scale = found / process_set.size() if op == AVERAGE else found
        return torch.sparse_coo_tensor(rows.t(), scale, tensor.shape).coalesce()

    return _Pending(values.handle, process_set, finish)


# -- allgather, broadcast, alltoall ------------------------------------------------------------


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> _Pending:
    """Begins `allgather`."""
    if not _tensor(tensor).dim():
        raise ValueError("allgather takes tensors with a first dimension, not a scalar")
    meta = Meta("allgather", str(tensor.dtype), tuple(tensor.shape[1:]), device=tensor.device.type)
    handle = _issue(Request(_named("allgather", name, process_set), meta, tensor.detach()), process_set)
    process_set.coordinator.drive()
    return _Pending(handle, process_set, lambda result: result)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, group: ProcessSet) -> Any:
        pending = allgather_async(tensor, name, group)
        ctx.rows, ctx.name, ctx.group = len(tensor), name, group
        return synchronize(pending)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        name = None if ctx.name is None else f"{ctx.name}.gradient"
        total = allreduce(gradient, name=name, op=SUM, process_set=ctx.group)
        rows = allgather(torch.tensor([ctx.rows]), None if name is None else f"{name}.rows", ctx.group).tolist()
        start = sum(rows[: ctx.group.rank()])
        return total[start : start + ctx.rows], None, None


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensors of all ranks along the first dimension, in which they may differ; differentiable."""
    found: torch.Tensor = _apply(_Allgather, tensor, name, process_set)
    return found


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """`allgather` of several tensors."""
    base = _named("grouped_allgather", name, process_set)
    pending = [allgather_async(tensor, f"{base}.{index}", process_set) for index, tensor in enumerate(tensors)]
    return [synchronize(one) for one in pending]


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> _Pending:
    """Begins a broadcast into the tensor."""
    if root_rank not in process_set.ranks:
        raise ValueError(f"root_rank is {root_rank}; the ranks are {process_set.ranks}")
    root = process_set.ranks.index(root_rank)
    meta = Meta("broadcast", str(_tensor(tensor).dtype), tuple(tensor.shape), root=root, device=tensor.device.type)
    handle = _issue(Request(_named("broadcast", name, process_set), meta, tensor.detach()), process_set)
    process_set.coordinator.drive()
    return _Pending(handle, process_set, lambda result: tensor)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> _Pending:
    """Begins a broadcast into a new tensor."""
    return broadcast_async_(_tensor(tensor).detach().clone(), root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensor of ``root_rank``, in place."""
    found: torch.Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return found


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root: int, name: str | None, group: ProcessSet) -> Any:
        ctx.root, ctx.name, ctx.group = root, name, group
        return synchronize(broadcast_async(tensor, root, name, group))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        name = None if ctx.name is None else f"{ctx.name}.gradient"
        total = allreduce(gradient, name=name, op=SUM, process_set=ctx.group)
        is_root = global_process_set.rank() == ctx.root
        return (total if is_root else torch.zeros_like(total)), None, None, None


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensor of ``root_rank``, on every rank; differentiable."""
    found: torch.Tensor = _apply(_Broadcast, tensor, root_rank, name, process_set)
    return found


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> _Pending:
    """Begins `alltoall`."""
    size, rows = process_set.size(), len(_tensor(tensor))
    if splits is None and rows % size:
        raise ValueError(f"alltoall of {rows} rows to {size} ranks needs splits")
    counts = [rows // size] * size if splits is None else [int(count) for count in splits]
    if len(counts) != size or sum(counts) != rows or min(counts, default=0) < 0:
        raise ValueError(f"splits are {counts}; {size} counts are needed that add up to {rows} rows")
    meta = Meta("alltoall", str(tensor.dtype), tuple(tensor.shape[1:]), device=tensor.device.type)
    request = Request(_named("alltoall", name, process_set), meta, tensor.detach(), counts)
    handle = _issue(request, process_set)
    process_set.coordinator.drive()
    return _Pending(handle, process_set, lambda result: result[0] if splits is None else result)


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows to every rank.

    Returns:
        What came from every rank; with ``splits`` also how many rows from each.
    """
    return synchronize(alltoall_async(tensor, splits, name, process_set))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's rows of the reduction; the first ranks get one more where they do not divide."""
    total = allreduce(
        tensor, None, None if name is None else f"{name}.scatter", compression, op, prescale_factor,
        postscale_factor, process_set,
    )  # fmt: skip
    size, mine = process_set.size(), process_set.rank()
    rows, more = divmod(len(total), size)
    start = mine * rows + min(mine, more)
    return total[start : start + rows + (mine < more)]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every rank is here."""
    request = Request(_named("barrier", None, process_set), Meta("barrier"), torch.empty(0))
    process_set.coordinator.wait(_issue(request, process_set))


def join(device: int = -1) -> int:
    """Says that this rank has no more data: it gives zeros to the others' reductions until all have joined.

    Returns:
        The rank that came last.
    """
    return global_process_set.coordinator.join()


def poll(handle: _Pending | Sequence[_Pending]) -> bool:
    """True if `synchronize` would not wait."""
    return all(one.handle.is_done for one in _each(handle))


def synchronize(handle: _Pending | Sequence[_Pending]) -> Any:
    """Waits for an asynchronous operation, or several, and gives the result.

    Raises:
        HorovodInternalError: it failed.
    """
    found = [one.finish(one.group.coordinator.wait(one.handle)) for one in _each(handle)]
    return found[0] if isinstance(handle, _Pending) else found


def _each(handle: _Pending | Sequence[_Pending]) -> Iterable[_Pending]:
    return [handle] if isinstance(handle, _Pending) else handle


# -- objects -----------------------------------------------------------------------------------


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """An object that pickles, of one rank, on every rank."""
    name = name or "broadcast_object"
    is_root = global_process_set.rank() == root_rank
    data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8) if is_root else torch.empty(0)
    length = broadcast_(torch.tensor([len(data)]), root_rank, f"{name}.size", process_set)
    if not is_root:
        data = torch.empty(int(length), dtype=torch.uint8)
    data = broadcast_(data, root_rank, f"{name}.data", process_set)
    return obj if is_root else pickle.loads(data.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Every rank's object, in the order of ranks."""
    name = name or "allgather_object"
    data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    sizes = allgather(torch.tensor([len(data)]), f"{name}.sizes", process_set).tolist()
    whole = allgather(data, f"{name}.data", process_set)
    return [pickle.loads(part.numpy().tobytes()) for part in torch.split(whole, sizes)]
