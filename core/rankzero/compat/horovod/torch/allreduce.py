"""Reductions of tensors, by name; synchronous, asynchronous and differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rankzero.compat.horovod.torch.compression import Compression
from rankzero.compat.horovod.torch.execute import AVERAGE, MAX, MIN, PRODUCT, SUM
from rankzero.compat.horovod.torch.messages import meta_of
from rankzero.compat.horovod.torch.pending import Key, Pending, begin, checked, issue, key_of, part_of, synchronize
from rankzero.compat.horovod.torch.world import ProcessSet, global_process_set

Average, Sum, Min, Max, Product = AVERAGE, SUM, MIN, MAX, PRODUCT
Adasum = "Adasum"


def checked_op(op: str | None, average: bool | None = None) -> str:
    """How to reduce. Raises ValueError, or NotImplementedError for Adasum."""
    if average is not None:
        if op is not None:
            raise ValueError("give op= or average=, not both")
        return AVERAGE if average else SUM
    if op == Adasum:
        raise NotImplementedError("op=hvd.Adasum is not supported: use op=hvd.Average, with the learning rate scaled")
    if op not in (None, AVERAGE, SUM, MIN, MAX, PRODUCT):
        raise ValueError(f"op is {op!r}; use hvd.Average, Sum, Min, Max or Product")
    return op or AVERAGE


def _check_type(tensor: torch.Tensor, op: str) -> None:
    """Raises TypeError where torch would give something for small tensors only, or a wrong value."""
    if tensor.dtype == torch.bool and op == AVERAGE:
        raise TypeError("a tensor of torch.bool has no average: use op=hvd.Sum, or another type")
    if tensor.is_complex() and op in (MIN, MAX, PRODUCT):
        raise TypeError(f"op is hvd.{op}, which torch does not reduce {tensor.dtype} with: use hvd.Sum or hvd.Average")


def _issue(tensor: torch.Tensor, key: Key, op: str, before: float, after: float, group: ProcessSet) -> Pending:
    """Issues a reduction in place."""
    shape = tuple(checked(tensor).shape)
    _check_type(tensor, op)
    meta = meta_of("allreduce", str(tensor.dtype), shape, op, 0, float(before), float(after), tensor.device.type)
    return issue(key, meta, tensor, group, lambda _: tensor)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """Begins a reduction in place; `synchronize` gives the tensor."""
    key = key_of("allreduce", name, process_set)
    return begin(_issue(tensor, key, checked_op(op, average), prescale_factor, postscale_factor, process_set))


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """Begins a reduction; `synchronize` gives a new tensor."""
    copy = checked(tensor).detach().clone()
    return allreduce_async_(copy, average, name, op, prescale_factor, postscale_factor, process_set)


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
    key = key_of("allreduce", name, process_set)
    pending = _issue(tensor, key, checked_op(op, average), prescale_factor, postscale_factor, process_set)
    result: torch.Tensor = synchronize(pending)
    return result


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *options: Any) -> Any:
        ctx.options = options
        name, op, before, after, group = options
        return allreduce_(tensor.detach().clone(), None, name, op, before, after, group)

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
    compressed, context = compression.compress(checked(tensor))
    options = name, checked_op(op, average), prescale_factor, postscale_factor, process_set
    if compressed.requires_grad and torch.is_grad_enabled():
        reduced: Any = _Allreduce.apply(compressed, *options)  # type: ignore[no-untyped-call]
    else:
        reduced = allreduce_(compressed.detach().clone(), None, *options)
    result: torch.Tensor = compression.decompress(reduced, context)
    return result


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Pending]:
    """Begins reductions in place; `synchronize` gives the tensors."""
    key, op = key_of("grouped", name, process_set), checked_op(op, average)
    found = [
        _issue(tensor, part_of(key, index), op, prescale_factor, postscale_factor, process_set)
        for index, tensor in enumerate(tensors)
    ]
    process_set.coordinator.drive()
    return found


def grouped_allreduce_async(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[Pending]:
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
