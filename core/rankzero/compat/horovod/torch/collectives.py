"""Collectives of tensors, matched by name. Those with ``async`` in their name return a `Request` to synchronize."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rankzero.compat.horovod.torch.operations import AVERAGE, MAX, MIN, PRODUCT, SUM, Meta, Request
from rankzero.compat.horovod.torch.world import ProcessSet
from rankzero.compat.horovod.torch.world import global_process_set as WORLD

_OPS = Average, Sum, Min, Max, Product = AVERAGE, SUM, MIN, MAX, PRODUCT
Adasum = "Adasum"
Tensors = Sequence[torch.Tensor]
Splits = torch.Tensor | Sequence[int] | None


class Compressor:
    """The interface of a compression, and the compression that sends tensors unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the tensor to send, and the context that `decompress` needs: the original type, or None."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Returns the received tensor in its original type."""
        return tensor if context is None else tensor.to(context)


class FP16Compressor(Compressor):
    """Sends floating-point tensors as float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the tensor to send, and its type."""
        return (tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor), tensor.dtype


class Compression:
    """The compressions that the operations accept: ``none`` and ``fp16``."""

    none, fp16 = Compressor, FP16Compressor


def poll(handle: Request | Sequence[Request]) -> bool:
    """Returns True if the operations have ended, and their results are in the tensors."""
    return handle.poll() if isinstance(handle, Request) else all(one.poll() for one in handle)


def synchronize(handle: Request | Sequence[Request]) -> Any:
    """Waits for one or several operations, and returns the result. Raises HorovodInternalError if one failed."""
    return handle.wait() if isinstance(handle, Request) else [one.wait() for one in handle]


def checked_op(op: str | None, average: bool | None = None, known: Sequence[str] = _OPS) -> str:
    """Returns the reduction that ``op`` or ``average`` names. Raises ValueError, or NotImplementedError for Adasum."""
    if average is not None and op is not None:
        raise ValueError("give op= or average=, not both")
    if op == Adasum:
        raise NotImplementedError("op=hvd.Adasum is not supported: use op=hvd.Average, with the learning rate scaled")
    if op not in (None, *known):
        raise ValueError(f"op is {op!r}; use {' or '.join(f'hvd.{each}' for each in known)}")
    return SUM if average is False else op or AVERAGE


def issue(
    kind: str,
    tensors: Tensors,
    name: str | None,
    group: ProcessSet,
    finish: Callable[[Request], Any] | None = None,
    options: tuple[str, int, float, float] = ("", 0, 1.0, 1.0),
    splits: Sequence[int] = (),
) -> Request:
    """Issues an operation; ranks match it by its kind and its name, or the number of the call without a name."""
    metas = []
    for tensor in tensors:
        if kind in ("allgather", "alltoall", "reducescatter") and not tensor.dim():
            raise ValueError(f"{kind} takes tensors with a first dimension, not a scalar")
        if kind in ("allreduce", "broadcast") and (tensor.is_conj() or tensor.is_neg()):
            raise ValueError("the memory of a view by conj() or imag has no place for results: clone() it")
        # Numbers of rows may differ between ranks.
        shape = tuple(tensor.shape)[1 if kind in ("allgather", "alltoall") else 0 :]
        metas.append(Meta(kind, str(tensor.dtype), shape, *options, tensor.device.type))
    if not metas:
        (nothing := Request(kind, [], [], finish)).end()
        return nothing
    sent = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors]
    return group.coordinator.issue(kind, name, metas, sent, finish, splits)


def _of_one(grouped: Callable[..., Any], text: str) -> Callable[..., Any]:
    """Returns the function of one tensor that a function of several tensors makes; its other arguments are the same."""

    def function(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = grouped([tensor], *args, **kwargs)
        return _single(found) if isinstance(found, Request) else found[0]

    function.__doc__ = f"{text} Arguments as for `{grouped.__name__}`."
    return function


def _waited(begin: Callable[..., Request], text: str) -> Callable[..., Any]:
    """Returns the function that waits for an asynchronous operation."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return begin(*args, **kwargs).wait()

    function.__doc__ = f"{text} Its arguments are those of the asynchronous function."
    return function


def _single(request: Request) -> Request:
    """Returns a handle whose result is the first tensor of the operation."""
    whole = request.finish
    request.finish = lambda request: (whole(request) if whole else request.tensors)[0]
    return request


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy that may be written to outside of inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        return tensor.detach().resolve_conj().resolve_neg().clone()


class _Operation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, begin: Callable[..., Request], backward: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        request = begin(tensors)
        found, ctx.backward_of, ctx.rows = tuple(request.wait()), backward, request.rows
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, *ctx.backward_of(ctx.rows, list(gradients))


def _differentiable(begin: Callable[..., Request], backward: Callable[..., Any], tensors: Tensors) -> Any:
    """Returns the results of an operation, and makes their gradients from its ``rows`` and its results' gradients."""
    return list(_Operation.apply(begin, backward, *tensors))  # type: ignore[no-untyped-call]


def _reduce(
    kind: str, tensors: Tensors, name: str | None, op: str, before: float, after: float, group: ProcessSet
) -> Request:
    if op in (MIN, MAX, PRODUCT) and any(tensor.is_complex() for tensor in tensors):
        raise TypeError(f"op is hvd.{op}, which torch does not reduce complex numbers with: use Sum or Average")

    def finish(request: Request) -> list[torch.Tensor]:
        """Returns the caller's tensors; of a reducescatter its rows, since an allreduce is faster with gloo."""
        if kind == "allreduce":
            return list(tensors)
        return [tensor.tensor_split(group.size())[group.rank()].clone() for tensor in tensors]

    return issue(kind, tensors, name, group, finish, (op, 0, float(before), float(after)))


def _reduced(kind: str, tensors: Tensors, name: str | None, compression: Any, *options: Any) -> list[torch.Tensor]:
    """Returns reductions. Their gradients are Horovod's: reduced likewise; of rows the gathered ones."""
    pairs, (op, before, after, group) = [compression.compress(tensor) for tensor in tensors], options

    def backward(_: Any, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        if kind == "allreduce":
            return _reduced(kind, gradients, name and f"{name}.gradient", Compression.none, *options)
        factor = before * after * (group.size() if op == SUM else 1)
        gathered: list[torch.Tensor] = grouped_allgather(
            [one * factor for one in gradients], name and f"{name}.gradient", group
        )
        return gathered

    sent = [tensor for tensor, _ in pairs]
    found = _differentiable(lambda them: _reduce(kind, list(map(_copied, them)), name, *options), backward, sent)
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
    return grouped_allreduce_async_([_copied(tensor) for tensor in tensors], *args, **kwargs)


allreduce_async_ = _of_one(grouped_allreduce_async_, "Starts a reduction in place; `synchronize` returns the tensor.")
allreduce_async = _of_one(grouped_allreduce_async, "Starts a reduction; `synchronize` returns a new tensor.")
grouped_allreduce_ = _waited(grouped_allreduce_async_, "Reduces several tensors together, in place, and returns them.")
allreduce_ = _waited(allreduce_async_, "Reduces every rank's tensor in place, and returns it.")


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

    Ranks are matched by ``name``, by default the number of the call. ``op`` is ``Average`` (None), ``Sum``, ``Min``,
    ``Max`` or ``Product``; ``average`` is its old name. ``compression`` is a member of `Compression`. The factors apply
    before and after the reduction. ``process_set`` has the ranks that take part.

    Raises:
        MismatchError: type, shape or ``op`` differ between ranks; the error names them.
        StallError: another rank does not issue the operation.
        HorovodInternalError: another rank died.
    """
    options = checked_op(op, average), prescale_factor, postscale_factor, process_set
    return _reduced("allreduce", tensors, name, compression, *options)


allreduce = _of_one(grouped_allreduce, "Returns the reduction of every rank's tensor; differentiable.")


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


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: str = AVERAGE,
    process_set: ProcessSet = WORLD,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Request:
    """Starts a `grouped_reducescatter`; `synchronize` returns its results."""
    copies = [_copied(tensor) for tensor in tensors]
    op = checked_op(op, known=(AVERAGE, SUM))
    return _reduce("reducescatter", copies, name, op, prescale_factor, postscale_factor, process_set)


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
    options = checked_op(op, known=(AVERAGE, SUM)), prescale_factor, postscale_factor, process_set
    return _reduced("reducescatter", tensors, name, compression, *options)


reducescatter_async = _of_one(grouped_reducescatter_async, "Starts a reduction, of which `synchronize` returns rows.")
reducescatter = _of_one(grouped_reducescatter, "Returns this rank's rows of the reduction; differentiable.")


def grouped_allgather_async(tensors: Tensors, name: str | None = None, process_set: ProcessSet = WORLD) -> Request:
    """Starts a `grouped_allgather`; `synchronize` returns its results."""
    return issue("allgather", list(tensors), name, process_set)


def grouped_allgather(tensors: Tensors, name: str | None = None, process_set: ProcessSet = WORLD) -> Any:
    """Returns the tensors of all ranks, concatenated in the first dimension, which may differ; differentiable."""

    def backward(rows: list[list[int]], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns this rank's rows of the average, as in Horovod."""
        averages = grouped_allreduce(gradients, name=name and f"{name}.gradient", process_set=process_set)
        parts = (torch.split(average, counts) for average, counts in zip(averages, rows, strict=True))
        return [part[process_set.rank()] for part in parts]

    return _differentiable(lambda them: grouped_allgather_async(them, name, process_set), backward, tensors)


allgather_async = _of_one(grouped_allgather_async, "Starts an `allgather`; `synchronize` returns its result.")
allgather = _of_one(grouped_allgather, "Returns the rows of all ranks, whose numbers may differ; differentiable.")


def _begin_alltoall(tensor: torch.Tensor, splits: Splits, name: str | None, group: ProcessSet) -> Request:
    """Starts an alltoall, whose result is the rows, and how many came from each rank."""
    size, rows = group.size(), len(tensor)
    if splits is None and rows % size:
        raise ValueError(f"alltoall of {rows} rows to {size} ranks needs splits")
    counts = [rows // size] * size if splits is None else [int(count) for count in splits]
    if len(counts) != size or sum(counts) != rows or min(counts, default=0) < 0:
        raise ValueError(f"splits are {counts}; {size} counts are needed that add up to {rows} rows")

    def finish(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
        return request.tensors[0], torch.tensor(request.rows[0], dtype=torch.int32, device="cpu")

    return issue("alltoall", [tensor], name, group, finish, splits=counts)


def alltoall_async(
    tensor: torch.Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = WORLD
) -> Request:
    """Starts an `alltoall`; `synchronize` returns its result."""
    request = _begin_alltoall(tensor, splits, name, process_set)
    return _single(request) if splits is None else request


def alltoall(
    tensor: torch.Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = WORLD
) -> Any:
    """Returns the rows that every rank sends to this one; with ``splits`` also how many. Differentiable."""

    def backward(rows: list[list[int]], gradients: list[torch.Tensor]) -> Any:
        return [alltoall(gradients[0], rows[0], name and f"{name}.gradient", process_set)[0]]

    found = _differentiable(lambda of: _begin_alltoall(of[0], splits, name, process_set), backward, [tensor])
    return found[0] if splits is None else tuple(found)


def _broadcast(tensor: torch.Tensor, root_rank: int, name: str | None, group: ProcessSet) -> Request:
    if group.coordinator and root_rank not in group.ranks:
        raise ValueError(f"root_rank is {root_rank}; the ranks are {group.ranks}")
    options = "", group.ranks.index(root_rank), 1.0, 1.0
    return issue("broadcast", [tensor], name, group, lambda _: [tensor], options)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = WORLD
) -> Request:
    """Starts a broadcast into the tensor; `synchronize` returns it."""
    return _single(_broadcast(tensor, root_rank, name, process_set))


def broadcast_async(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Request:
    """Starts a broadcast; `synchronize` returns a new tensor."""
    return broadcast_async_(_copied(tensor), *args, **kwargs)


broadcast_ = _waited(broadcast_async_, "Copies the tensor of ``root_rank`` into the given tensor, and returns it.")


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = WORLD) -> Any:
    """Returns the tensor of ``root_rank`` on every rank. Its gradient is the average on the root, elsewhere zero."""

    def backward(_: Any, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        average = allreduce(gradients[0], name=name and f"{name}.gradient", process_set=process_set)
        return [average if WORLD.rank() == root_rank else torch.zeros_like(average)]

    return _differentiable(lambda of: _broadcast(_copied(of[0]), root_rank, name, process_set), backward, [tensor])[0]


def barrier(process_set: ProcessSet = WORLD) -> None:
    """Waits until every rank of the set has called it."""
    issue("barrier", [torch.empty(0, device="cpu")], None, process_set).wait()


def join(device: int = -1) -> int:
    """Adds zeros to other ranks' reductions until all ranks have joined. Returns the rank that joined last."""
    return WORLD.coordinator.join()
