"""Reductions of tensors, matched by name: synchronous, asynchronous and differentiable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rankzero.compat.horovod.torch.compression import Compression
from rankzero.compat.horovod.torch.execute import AVERAGE, MAX, MIN, PRODUCT, SUM
from rankzero.compat.horovod.torch.messages import meta_of
from rankzero.compat.horovod.torch.pending import (
    Key,
    Pending,
    begin,
    checked,
    issue_in_place,
    key_of,
    keys_of,
    synchronize,
)
from rankzero.compat.horovod.torch.world import ProcessSet, global_process_set

Average, Sum, Min, Max, Product = AVERAGE, SUM, MIN, MAX, PRODUCT
Adasum = "Adasum"


def checked_op(op: str | None, average: bool | None = None) -> str:
    """Returns the reduction that ``op`` or ``average`` names. Raises ValueError, or NotImplementedError for Adasum."""
    if average is not None:
        if op is not None:
            raise ValueError("give op= or average=, not both")
        return AVERAGE if average else SUM
    if op == Adasum:
        raise NotImplementedError("op=hvd.Adasum is not supported: use op=hvd.Average, with the learning rate scaled")
    if op not in (None, AVERAGE, SUM, MIN, MAX, PRODUCT):
        raise ValueError(f"op is {op!r}; use hvd.Average, Sum, Min, Max or Product")
    return op or AVERAGE


_REDUCIBLE = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
}  # fmt: skip


def _check_type(tensor: torch.Tensor, op: str) -> None:
    """Raises TypeError for a type that torch reduces wrongly, not at all, or only in small tensors."""
    if tensor.dtype not in _REDUCIBLE:
        raise TypeError(f"torch does not reduce tensors of {tensor.dtype}: convert it before")
    if tensor.dtype == torch.bool and op == AVERAGE:
        raise TypeError("a tensor of torch.bool has no average: use op=hvd.Sum, or another type")
    if tensor.is_complex() and op in (MIN, MAX, PRODUCT):
        raise TypeError(f"op is hvd.{op}, which torch does not reduce {tensor.dtype} with: use hvd.Sum or hvd.Average")


def _issue(tensor: torch.Tensor, key: Key, op: str, before: float, after: float, group: ProcessSet) -> Pending:
    """Issues a reduction in place."""
    shape = tuple(checked(tensor).shape)
    _check_type(tensor, op)
    meta = meta_of("allreduce", str(tensor.dtype), shape, op, 0, float(before), float(after), tensor.device.type)
    return issue_in_place(key, meta, tensor, group)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """Starts a reduction in place; `synchronize` returns the tensor."""
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
    """Starts a reduction; `synchronize` returns a new tensor."""
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
    """Reduces every rank's tensor in place, and returns it. Arguments as for `allreduce`."""
    key = key_of("allreduce", name, process_set)
    pending = _issue(tensor, key, checked_op(op, average), prescale_factor, postscale_factor, process_set)
    result: torch.Tensor = synchronize(pending)
    return result


class _Allreduce(torch.autograd.Function):
    """Differentiable reduction of tensors, whose gradients are reduced in the same way."""

    @staticmethod
    def forward(ctx: Any, kind: str, name: str | None, options: tuple[Any, ...], *tensors: torch.Tensor) -> Any:
        ctx.kind, ctx.name, ctx.options = kind, name, options
        copies = [tensor.detach().clone() for tensor in tensors]
        return tuple(synchronize(issue_reductions(kind, name, copies, *options)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        name = None if ctx.name is None else f"{ctx.name}.gradient"
        reduced: Any = _Allreduce.apply(ctx.kind, name, ctx.options, *gradients)  # type: ignore[no-untyped-call]
        return None, None, None, *reduced


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
    """Returns the reduction of every rank's tensor, on every rank; differentiable.

    Args:
        tensor: A tensor of the same type and shape on all ranks.
        average: Old name of ``op``.
        name: Name by which the ranks' calls are matched; None: the number of the call.
        compression: A member of `Compression`: the type in which the tensor is sent.
        op: ``Average`` (None), ``Sum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor: Factor before the reduction.
        postscale_factor: Factor after the reduction.
        process_set: The ranks that take part.

    Returns:
        A new tensor.

    Raises:
        MismatchError: type, shape or ``op`` differ between ranks; the error names them.
        StallError: another rank does not issue the operation.
        HorovodInternalError: another rank died.
    """
    compressed, context = compression.compress(checked(tensor))
    options = checked_op(op, average), prescale_factor, postscale_factor, process_set
    if compressed.requires_grad and torch.is_grad_enabled():
        (reduced,) = _Allreduce.apply("allreduce", name, options, compressed)  # type: ignore[no-untyped-call]
    else:
        reduced = allreduce_(compressed.detach().clone(), None, name, *options)
    result: torch.Tensor = compression.decompress(reduced, context)
    return result


def issue_reductions(
    kind: str,
    name: str | None,
    tensors: Sequence[torch.Tensor],
    op: str,
    before: float,
    after: float,
    group: ProcessSet,
) -> list[Pending]:
    """Issues reductions in place, which `synchronize` executes together."""
    keys = keys_of(kind, name, group, len(tensors))
    return [_issue(tensor, key, op, before, after, group) for tensor, key in zip(tensors, keys, strict=True)]


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Pending]:
    """Starts reductions in place; `synchronize` returns the tensors."""
    op = checked_op(op, average)
    return begin(issue_reductions("grouped", name, tensors, op, prescale_factor, postscale_factor, process_set))


def grouped_allreduce_async(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[Pending]:
    """Starts reductions of several tensors together; `synchronize` returns new tensors."""
    return grouped_allreduce_async_([tensor.detach().clone() for tensor in tensors], *args, **kwargs)


def grouped_allreduce_(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Reduces several tensors together, in place, and returns them."""
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
    """Returns the reductions of several tensors together; differentiable. Arguments as for `allreduce`."""
    options = checked_op(op, average), prescale_factor, postscale_factor, process_set
    return compressed_by(
        compression,
        tensors,
        lambda them: _Allreduce.apply("grouped", name, options, *them),  # type: ignore[no-untyped-call]
    )


def compressed_by(
    compression: Any,
    tensors: Sequence[torch.Tensor],
    reduce: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
) -> list[torch.Tensor]:
    """Applies ``reduce`` to compressed tensors, and decompresses its results."""
    pairs = [compression.compress(checked(tensor)) for tensor in tensors]
    reduced = reduce([tensor for tensor, _ in pairs])
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)]
