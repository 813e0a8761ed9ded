"""Reductions and gathers matched by name: synchronous, asynchronous and differentiable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rankzero.compat.horovod.torch.compression import Compression
from rankzero.compat.horovod.torch.operations import AVERAGE, MAX, MIN, PRODUCT, SUM, Meta, Request
from rankzero.compat.horovod.torch.world import ProcessSet
from rankzero.compat.horovod.torch.world import global_process_set as WORLD

Average, Sum, Min, Max, Product, Adasum = AVERAGE, SUM, MIN, MAX, PRODUCT, "Adasum"
Tensors = Sequence[torch.Tensor]


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


def checked(tensor: Any) -> torch.Tensor:
    """Returns a dense tensor unchanged. Raises TypeError for anything else."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a collective takes a torch.Tensor, not a {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise TypeError("a collective takes a dense tensor: to_dense() it, or use hvd.sparse_allreduce_async")
    return tensor


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
    for tensor in map(checked, tensors):
        if kind in ("allgather", "alltoall", "reducescatter") and not tensor.dim():
            raise ValueError(f"{kind} takes tensors with a first dimension, not a scalar")
        # Numbers of rows may differ between ranks.
        shape = tuple(tensor.shape)[1 if kind in ("allgather", "alltoall") else 0 :]
        metas.append(Meta(kind, tensor.dtype, shape, *options, tensor.device.type))
    if not metas:
        # There is nothing to agree on.
        (empty := Request(kind, [], [], finish)).end(None)
        return empty
    return group.coordinator.issue(kind, name, metas, [tensor.detach() for tensor in tensors], finish, splits)


def of_one(grouped: Callable[..., Any], text: str) -> Callable[..., Any]:
    """Returns the function of one tensor that a function of several tensors makes; its other arguments are the same."""

    def function(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = grouped([tensor], *args, **kwargs)
        return single(found) if isinstance(found, Request) else found[0]

    function.__doc__ = f"{text} Arguments as for `{grouped.__name__}`."
    return function


def single(request: Request) -> Request:
    """Returns a handle whose result is the first tensor of the operation."""
    whole = request.finish
    request.finish = lambda request: whole(request)[0] if whole else request.tensors[0]
    return request


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy into which another thread may write, unlike into one that is made in inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        return checked(tensor).detach().resolve_conj().resolve_neg().clone()


def written_into(tensors: Tensors) -> tuple[list[torch.Tensor], Callable[[Request], list[torch.Tensor]]]:
    """Returns tensors that stand for those into which results are written, and the function that completes these."""
    sent = list(map(checked, tensors))
    for at, tensor in enumerate(sent):
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ValueError("elements of the tensor share their memory (expand): clone() it, to write there")
        # The memory of a conjugated or negated tensor does not contain its values.
        if tensor.is_inference() or tensor.is_conj() or tensor.is_neg():
            sent[at] = copied(tensor)

    def finish(_: Request) -> list[torch.Tensor]:
        with torch.no_grad():
            return [to if to is own else to.copy_(own) for to, own in zip(tensors, sent, strict=True)]

    return sent, finish


class _Operation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, begin: Callable[..., Request], backward: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        request = begin(tensors)
        found, ctx.backward_of, ctx.rows = tuple(request.wait()), backward, request.rows
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, *ctx.backward_of(ctx.rows, list(gradients))


def differentiable(begin: Callable[..., Request], backward: Callable[..., Any], tensors: Tensors) -> list[torch.Tensor]:
    """Returns the results of the operation that ``begin`` issues on detached tensors, through which gradients pass.

    ``backward`` makes the gradients of the tensors from the request's ``rows`` and the gradients of the results.
    """
    return list(_Operation.apply(begin, backward, *tensors))  # type: ignore[no-untyped-call]


def gradient_of(name: str | None) -> str | None:
    """Returns the name of the operation that reduces the gradients of an operation."""
    return name and f"{name}.gradient"


_REDUCIBLE = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
}  # fmt: skip


def _reduce(
    kind: str, tensors: Tensors, name: str | None, op: str, before: float, after: float, group: ProcessSet
) -> Request:
    for tensor in map(checked, tensors):
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


def _reduced(kind: str, tensors: Tensors, name: str | None, compression: Any, *options: Any) -> list[torch.Tensor]:
    """Returns reductions. Their gradients are Horovod's: reduced likewise; of rows the gathered ones."""
    pairs, (op, before, after, group) = [compression.compress(tensor) for tensor in tensors], options

    def backward(_: Any, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        if kind == "allreduce":
            return _reduced(kind, gradients, gradient_of(name), Compression.none, *options)
        factor = before * after * (group.size() if op == SUM else 1)
        return grouped_allgather([gradient * factor for gradient in gradients], gradient_of(name), group)

    sent = [tensor for tensor, _ in pairs]
    found = differentiable(lambda them: _reduce(kind, list(map(copied, them)), name, *options), backward, sent)
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(found, pairs, strict=True)]


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


allreduce_async_ = of_one(grouped_allreduce_async_, "Starts a reduction in place; `synchronize` returns the tensor.")
allreduce_async = of_one(grouped_allreduce_async, "Starts a reduction; `synchronize` returns a new tensor.")
allreduce_ = of_one(grouped_allreduce_, "Reduces every rank's tensor in place, and returns it.")


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
    return _reduced("allreduce", tensors, name, compression, *options)


allreduce = of_one(grouped_allreduce, "Returns the reduction of every rank's tensor; differentiable.")


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: str = AVERAGE, process_set: ProcessSet = WORLD
) -> Request:
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
    return _reduced("reducescatter", tensors, name, compression, *options)


reducescatter_async = of_one(grouped_reducescatter_async, "Starts a `reducescatter`; `synchronize` returns its result.")
reducescatter = of_one(grouped_reducescatter, "Returns this rank's rows of the reduction; differentiable.")


def grouped_allgather_async(tensors: Tensors, name: str | None = None, process_set: ProcessSet = WORLD) -> Request:
    """Starts a `grouped_allgather`; `synchronize` returns its results."""
    return issue("allgather", list(tensors), name, process_set, lambda request: request.tensors)


def grouped_allgather(tensors: Tensors, name: str | None = None, process_set: ProcessSet = WORLD) -> list[torch.Tensor]:
    """Returns the tensors of all ranks, concatenated in the first dimension, which may differ; differentiable."""

    def backward(rows: list[list[int]], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns this rank's rows of the average, as in Horovod."""
        averages = grouped_allreduce(gradients, name=gradient_of(name), process_set=process_set)
        parts = (torch.split(average, counts) for average, counts in zip(averages, rows, strict=True))
        return [part[process_set.rank()] for part in parts]

    return differentiable(lambda them: grouped_allgather_async(them, name, process_set), backward, tensors)


allgather_async = of_one(grouped_allgather_async, "Starts an `allgather`; `synchronize` returns its result.")
allgather = of_one(grouped_allgather, "Returns the rows of all ranks, whose numbers may differ; differentiable.")
