"""Reductions matched by name: synchronous, asynchronous and differentiable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rankzero.compat.horovod.torch.execute import AVERAGE, MAX, MIN, PRODUCT, SUM
from rankzero.compat.horovod.torch.requests import Meta, Request
from rankzero.compat.horovod.torch.world import ProcessSet
from rankzero.compat.horovod.torch.world import global_process_set as WORLD  # noqa: N812

Average, Sum, Min, Max, Product, Adasum = AVERAGE, SUM, MIN, MAX, PRODUCT, "Adasum"
Tensors = Sequence[torch.Tensor]


class Compressor:
    """The interface of a compression, and the compression that sends tensors unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the tensor to send, and the context that `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Returns the received tensor in its original type."""
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point tensors as float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the tensor to send, and its type."""
        return (tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Returns the received tensor in its original type."""
        return tensor.to(context)


class Compression:
    """The compressions that the operations accept: ``none`` and ``fp16``."""

    none = Compressor
    fp16 = FP16Compressor


def poll(handle: Request | Sequence[Request]) -> bool:
    """Returns True if `synchronize` would return without waiting."""
    return handle.poll() if isinstance(handle, Request) else all(one.poll() for one in handle)


def synchronize(handle: Request | Sequence[Request]) -> Any:
    """Waits for one or several asynchronous operations, and returns the result.

    Raises:
        HorovodInternalError: an operation failed.
    """
    return handle.wait() if isinstance(handle, Request) else [one.wait() for one in handle]


def checked_op(op: str | None, average: bool | None = None) -> str:
    """Returns the reduction that ``op`` or ``average`` names. Raises ValueError, or NotImplementedError for Adasum."""
    if average is not None and op is not None:
        raise ValueError("give op= or average=, not both")
    if op == Adasum:
        raise NotImplementedError("op=hvd.Adasum is not supported: use op=hvd.Average, with the learning rate scaled")
    if op not in (None, AVERAGE, SUM, MIN, MAX, PRODUCT):
        raise ValueError(f"op is {op!r}; use hvd.Average, Sum, Min, Max or Product")
    return SUM if average is False else op or AVERAGE


def issue(
    kind: str,
    tensors: Tensors,
    name: str | None,
    group: ProcessSet,
    finish: Callable[[Request], Any],
    options: tuple[str, int, float, float] = ("", 0, 1.0, 1.0),
    splits: Sequence[int] = (),
) -> Request:
    """Issues an operation; ranks match it by its kind and its name, or the number of the call without a name."""
    metas = []
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a collective takes a torch.Tensor, not a {type(tensor).__name__}")
        if tensor.layout != torch.strided:
            raise TypeError("a collective takes a dense tensor: to_dense() it, or use hvd.sparse_allreduce_async")
        if kind in ("allgather", "alltoall", "reducescatter") and not tensor.dim():
            raise ValueError(f"{kind} takes tensors with a first dimension, not a scalar")
        # Numbers of rows may differ between ranks.
        shape = tuple(tensor.shape)[1 if kind in ("allgather", "alltoall") else 0 :]
        metas.append(Meta(kind, tensor.dtype, shape, *options, tensor.device.type))
    return group.coordinator.issue(kind, name, metas, [tensor.detach() for tensor in tensors], finish, splits)


def single(request: Request) -> Request:
    """Returns a handle whose result is the first tensor of the operation."""
    whole = request.finish or (lambda request: request.tensors)
    request.finish = lambda request: whole(request)[0]
    return request


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy into which another thread may write, unlike into one that is made in inference mode."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        return tensor
    with torch.inference_mode(False), torch.no_grad():
        return tensor.detach().resolve_conj().resolve_neg().clone()


def written_into(tensors: Tensors) -> tuple[list[torch.Tensor], Callable[[Request], list[torch.Tensor]]]:
    """Returns tensors that stand for those into which results are written, and the function that completes these."""
    sent = []
    for tensor in tensors:
        is_dense = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
        if is_dense and any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ValueError("elements of the tensor share their memory (expand): nothing can be written there; clone() it")
        # The memory of a conjugated or negated tensor does not contain its values.
        sent.append(copied(tensor) if is_dense and (tensor.is_inference() or tensor.is_conj() or tensor.is_neg()) else tensor)

    def finish(_: Request) -> list[torch.Tensor]:
        with torch.no_grad():
            return [to if to is own else to.copy_(own) for to, own in zip(tensors, sent, strict=True)]

    return sent, finish


# -- reductions --------------------------------------------------------------------------------

_REDUCIBLE = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
}  # fmt: skip


def _reduce(
    kind: str, tensors: Tensors, name: str | None, op: str, before: float, after: float, group: ProcessSet
) -> Request:
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            continue
        # Types that torch reduces wrongly, not at all, or only in small tensors.
        if tensor.dtype not in _REDUCIBLE:
            raise TypeError(f"torch does not reduce tensors of {tensor.dtype}: convert it before")
        if tensor.dtype == torch.bool and op == AVERAGE:
            raise TypeError("a tensor of torch.bool has no average: use op=hvd.Sum, or another type")
        if tensor.is_complex() and op in (MIN, MAX, PRODUCT):
            raise TypeError(f"op is hvd.{op}, which torch does not reduce {tensor.dtype} with: use Sum or Average")
    sent, written = written_into(tensors)

    def own_rows(request: Request) -> list[torch.Tensor]:
        """Returns this rank's rows; torch's gloo executes an allreduce faster than a reducescatter."""
        return [tensor.tensor_split(group.size())[group.rank()].clone() for tensor in written(request)]

    finish = own_rows if kind == "reducescatter" else written
    return issue(kind, sent, name, group, finish, (op, 0, float(before), float(after)))


class _Reduction(torch.autograd.Function):
    """Differentiable reductions, with Horovod's gradients: the same reduction; of rows the gathered gradients."""

    @staticmethod
    def forward(ctx: Any, kind: str, name: str | None, options: tuple[Any, ...], *tensors: torch.Tensor) -> Any:
        ctx.kind, ctx.name, ctx.options = kind, name, options
        return tuple(_reduce(kind, [copied(tensor) for tensor in tensors], name, *options).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        name, (op, before, after, group) = ctx.name and f"{ctx.name}.gradient", ctx.options
        if ctx.kind == "allreduce":
            return None, None, None, *_Reduction.apply("allreduce", name, ctx.options, *gradients)  # type: ignore[no-untyped-call]
        factor = before * after * (group.size() if op == SUM else 1)
        from rankzero.compat.horovod.torch.ops import grouped_allgather

        return None, None, None, *grouped_allgather([gradient * factor for gradient in gradients], name, group)


def _compressed(kind: str, tensors: Tensors, name: str | None, compression: Any, *options: Any) -> list[torch.Tensor]:
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced: Any = _Reduction.apply(kind, name, options, *(tensor for tensor, _ in pairs))  # type: ignore[no-untyped-call]
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)]


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = WORLD,
) -> Request:
    """Starts reductions in place, which become ready together; `synchronize` returns the tensors."""
    op = checked_op(op, average)
    return _reduce("allreduce", list(tensors), name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_async(tensors: Tensors, *args: Any, **kwargs: Any) -> Request:
    """Starts reductions of several tensors, which become ready together; `synchronize` returns new tensors."""
    return grouped_allreduce_async_([copied(tensor) for tensor in tensors], *args, **kwargs)


def grouped_allreduce_(tensors: Tensors, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Reduces several tensors together, in place, and returns them."""
    found: list[torch.Tensor] = grouped_allreduce_async_(tensors, *args, **kwargs).wait()
    return found


def allreduce_async_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Request:
    """Starts a reduction in place; `synchronize` returns the tensor."""
    return single(grouped_allreduce_async_([tensor], *args, **kwargs))


def allreduce_async(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Request:
    """Starts a reduction; `synchronize` returns a new tensor."""
    return allreduce_async_(copied(tensor), *args, **kwargs)


def allreduce_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Reduces every rank's tensor in place, and returns it. Arguments as for `grouped_allreduce_async_`."""
    found: torch.Tensor = allreduce_async_(tensor, *args, **kwargs).wait()
    return found


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = WORLD,
) -> list[torch.Tensor]:
    """Returns the reductions of several tensors, on every rank; differentiable.

    Args:
        tensors: Tensors of the same types and shapes on all ranks.
        average: Old name of ``op``.
        name: Name by which the ranks' calls are matched; None: the number of the call.
        compression: A member of `Compression`: the type in which tensors are sent.
        op: ``Average`` (None), ``Sum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor: Factor before the reduction.
        postscale_factor: Factor after the reduction.
        process_set: The ranks that take part.

    Raises:
        MismatchError: type, shape or ``op`` differ between ranks; the error names them.
        StallError: another rank does not issue the operation.
        HorovodInternalError: another rank died.
    """
    options = checked_op(op, average), prescale_factor, postscale_factor, process_set
    return _compressed("allreduce", tensors, name, compression, *options)


def allreduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns the reduction of every rank's tensor, on every rank; differentiable. As `grouped_allreduce`."""
    return grouped_allreduce([tensor], *args, **kwargs)[0]


def sparse_allreduce_async(tensor: torch.Tensor, name: str, op: str = AVERAGE, process_set: ProcessSet = WORLD) -> Request:
    """Starts a reduction of a sparse tensor, whose rows travel; `synchronize`, or a call, returns a sparse tensor."""
    if op not in (AVERAGE, SUM):
        raise ValueError(f"a sparse gradient can be averaged or summed, not reduced by {op}")
    whole = tensor.coalesce()

    def finish(request: Request) -> torch.Tensor:
        rows, values = request.tensors
        values = values / process_set.size() if op == AVERAGE else values
        return torch.sparse_coo_tensor(rows.t(), values, whole.shape, check_invariants=False).coalesce()

    return issue("allgather", [whole.indices().t().contiguous(), whole.values()], name, process_set, finish)


def _scattered(op: str | None) -> str:
    if checked_op(op) not in (AVERAGE, SUM):
        raise ValueError(f"op is {op!r}; reducescatter takes hvd.Average or hvd.Sum")
    return checked_op(op)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: str = AVERAGE,
    process_set: ProcessSet = WORLD,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Request:
    """Starts a `grouped_reducescatter`; `synchronize` returns its results."""
    copies = [copied(tensor) for tensor in tensors]
    return _reduce("reducescatter", copies, name, _scattered(op), prescale_factor, postscale_factor, process_set)


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str = AVERAGE,
    process_set: ProcessSet = WORLD,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Returns this rank's rows of the reductions of several tensors; differentiable. The first ranks get the rest."""
    options = _scattered(op), prescale_factor, postscale_factor, process_set
    return _compressed("reducescatter", tensors, name, compression, *options)


def reducescatter_async(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Request:
    """Starts a `reducescatter`; arguments as for `grouped_reducescatter_async`."""
    return single(grouped_reducescatter_async([tensor], *args, **kwargs))


def reducescatter(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns this rank's rows of the reduction of every rank's tensor; differentiable."""
    return grouped_reducescatter([tensor], *args, **kwargs)[0]
