"""Collectives, matched by name. Those with ``async`` in their name return a `Request` to synchronize."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import cloudpickle
import torch

from rankzero.compat.horovod.torch.operations import AVERAGE, MAX, MIN, PRODUCT, SUM, Meta, Request, to_bytes
from rankzero.compat.horovod.torch.world import ProcessSet
from rankzero.compat.horovod.torch.world import global_process_set as WORLD

_OPS = Average, Sum, Min, Max, Product = AVERAGE, SUM, MIN, MAX, PRODUCT
Adasum = "Adasum"
_WITH_AVERAGE = {torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
                 torch.float64}  # fmt: skip
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
    if op not in (None, *known):
        error: type[Exception] = NotImplementedError if op == Adasum else ValueError
        raise error(f"op is {op!r}; use {' or '.join(f'hvd.{each}' for each in known)}")
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
        if tensor.is_complex() or tensor.is_neg():
            raise TypeError("complex tensors and their parts are not sent: send torch.view_as_real(tensor)")
        known = _WITH_AVERAGE if options[0] == AVERAGE else {*_WITH_AVERAGE, torch.bool}
        if kind in ("allreduce", "reducescatter") and tensor.dtype not in known:
            raise TypeError(f"{options[0]} of {tensor.dtype} is not supported: give tensor.float() or tensor.int()")
        # Numbers of rows may differ between ranks.
        shape = tuple(tensor.shape)[1 if kind in ("allgather", "alltoall") else 0 :]
        metas.append(Meta(kind, str(tensor.dtype), shape, *options, tensor.device.type))
    if not metas:
        (nothing := Request(kind, [], [], finish)).end()
        return nothing
    return group.coordinator.issue(kind, name, metas, [tensor.detach() for tensor in tensors], finish, splits)


def _of_one(grouped: Callable[..., Any], text: str) -> Callable[..., Any]:
    """Returns the function of one tensor that a function of several tensors makes; its other arguments are the same."""

    def function(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = grouped([tensor], *args, **kwargs)
        if not isinstance(found, Request):
            return found[0]
        whole = found.finish
        found.finish = lambda request: (whole(request) if whole else request.tensors)[0]
        return found

    function.__doc__ = f"{text} Arguments as for `{grouped.__name__}`."
    return function


def _waited(begin: Callable[..., Request], text: str) -> Callable[..., Any]:
    """Returns the function that waits for an asynchronous operation."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return begin(*args, **kwargs).wait()

    function.__doc__ = f"{text} Its arguments are those of the asynchronous function."
    return function


class _Operation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, begin: Callable[..., Request], backward: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        ctx.request, ctx.backward_of = begin(tensors), backward
        found = ctx.request.wait()
        return tuple(found) if isinstance(found, (list, tuple)) else (found,)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, *ctx.backward_of(ctx.request, list(gradients))


def _differentiable(
    begin: Callable[..., Request], backward: Callable[..., Any], tensors: Tensors, compression: Any = Compression.none
) -> list[Any]:
    """Returns the results of an operation; ``backward`` makes gradients from its request and its results' gradients."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    sent = [tensor for tensor, _ in pairs]
    has_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in sent)
    apply: Any = _Operation.apply if has_gradient else functools.partial(_Operation.forward, SimpleNamespace())
    found = apply(begin, backward, *sent)
    return [compression.decompress(one, context) for one, (_, context) in zip(found, pairs, strict=True)]


def _scaled(op: str, prescale_factor: float = 1.0, postscale_factor: float = 1.0) -> tuple[str, int, float, float]:
    return op, 0, float(prescale_factor), float(postscale_factor)


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
    given, options = list(tensors), _scaled(checked_op(op, average), prescale_factor, postscale_factor)
    return issue("allreduce", given, name, process_set, lambda _: given, options)


def grouped_allreduce_async(tensors: Tensors, *args: Any, **kwargs: Any) -> Request:
    """Starts reductions of several tensors, which become ready together; `synchronize` returns new tensors."""
    return grouped_allreduce_async_([tensor.detach().clone() for tensor in tensors], *args, **kwargs)


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

    Raises HorovodInternalError: as a MismatchError, a StallError, or if another rank has died.
    """
    options = checked_op(op, average), prescale_factor, postscale_factor, process_set

    def backward(_: Request, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        return grouped_allreduce(gradients, None, name and f"{name}.gradient", Compression.none, *options)

    return _differentiable(lambda of: grouped_allreduce_async(of, None, name, *options), backward, tensors, compression)


allreduce = _of_one(grouped_allreduce, "Returns the reduction of every rank's tensor; differentiable.")


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: str = AVERAGE, process_set: ProcessSet = WORLD
) -> Request:
    """Starts a reduction of a sparse tensor, whose rows travel; `synchronize`, or a call, returns a sparse tensor."""
    op, whole = checked_op(op, known=(AVERAGE, SUM)), tensor.coalesce()

    def finish(request: Request) -> torch.Tensor:
        rows, values = request.tensors
        values = values / process_set.size() if op == AVERAGE else values
        return torch.sparse_coo_tensor(rows.t(), values, whole.shape, check_invariants=False).coalesce()

    return issue("allgather", [whole.indices().t().contiguous(), whole.values()], name, process_set, finish)


def grouped_reducescatter_async(
    tensors: Tensors, name: str | None = None, op: str = AVERAGE, process_set: ProcessSet = WORLD, **scales: float
) -> Request:
    """Starts a `grouped_reducescatter`; `synchronize` returns its results."""
    copies = [tensor.detach().clone() for tensor in tensors]
    options = _scaled(checked_op(op, known=(AVERAGE, SUM)), **scales)

    def finish(_: Request) -> list[torch.Tensor]:
        """Returns rows of an allreduce, which is faster with gloo."""
        return [copy.tensor_split(process_set.size())[process_set.rank()].clone() for copy in copies]

    return issue("reducescatter", copies, name, process_set, finish, options)


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str = AVERAGE,
    process_set: ProcessSet = WORLD,
    **scales: float,
) -> list[torch.Tensor]:
    """Returns this rank's rows of the reductions of several tensors; differentiable. The first ranks get the rest.

    ``scales`` are ``prescale_factor`` and ``postscale_factor``.
    """

    def backward(request: Request, gradients: list[torch.Tensor]) -> Any:
        """Returns Horovod's gradients: the gathered ones."""
        meta = request.metas[0]
        factor = meta.before * meta.after * (process_set.size() if op == SUM else 1)
        return grouped_allgather([one * factor for one in gradients], name and f"{name}.gradient", process_set)

    begin = lambda of: grouped_reducescatter_async(of, name, op, process_set, **scales)  # noqa: E731
    return _differentiable(begin, backward, tensors, compression)


reducescatter_async = _of_one(grouped_reducescatter_async, "Starts a reduction, of which `synchronize` returns rows.")
reducescatter = _of_one(grouped_reducescatter, "Returns this rank's rows of the reduction; differentiable.")


def grouped_allgather_async(tensors: Tensors, name: str | None = None, process_set: ProcessSet = WORLD) -> Request:
    """Starts a `grouped_allgather`; `synchronize` returns its results."""
    return issue("allgather", list(tensors), name, process_set)


def grouped_allgather(tensors: Tensors, name: str | None = None, process_set: ProcessSet = WORLD) -> Any:
    """Returns the tensors of all ranks, concatenated in the first dimension, which may differ; differentiable."""

    def backward(request: Request, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns this rank's rows of the average, as in Horovod."""
        averages = grouped_allreduce(gradients, name=name and f"{name}.gradient", process_set=process_set)
        parts = (torch.split(average, counts) for average, counts in zip(averages, request.rows, strict=True))
        return [part[process_set.rank()] for part in parts]

    return _differentiable(lambda them: grouped_allgather_async(them, name, process_set), backward, tensors)


allgather_async = _of_one(grouped_allgather_async, "Starts an `allgather`; `synchronize` returns its result.")
allgather = _of_one(grouped_allgather, "Returns the rows of all ranks, whose numbers may differ; differentiable.")


def alltoall_async(
    tensor: torch.Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = WORLD
) -> Request:
    """Starts an `alltoall`; `synchronize` returns its result."""
    size, rows = process_set.size(), len(tensor)
    if splits is None and rows % size:
        raise ValueError(f"alltoall of {rows} rows to {size} ranks needs splits")
    counts = [rows // size] * size if splits is None else [int(count) for count in splits]
    if len(counts) != size or sum(counts) != rows or min(counts, default=0) < 0:
        raise ValueError(f"splits are {counts}; {size} counts are needed that add up to {rows} rows")

    def finish(request: Request) -> Any:
        came = torch.tensor(request.rows[0], dtype=torch.int32, device="cpu")
        return request.tensors[0] if splits is None else (request.tensors[0], came)

    return issue("alltoall", [tensor], name, process_set, finish, splits=counts)


def alltoall(
    tensor: torch.Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = WORLD
) -> Any:
    """Returns the rows that every rank sends to this one; with ``splits`` also how many. Differentiable."""

    def backward(request: Request, gradients: list[torch.Tensor]) -> Any:
        return [alltoall(gradients[0], request.rows[0], name and f"{name}.gradient", process_set)[0]]

    begin = lambda of: alltoall_async(of[0], splits, name, process_set)  # noqa: E731
    found = _Operation.apply(begin, backward, tensor)  # type: ignore[no-untyped-call]
    return found[0] if splits is None else found


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = WORLD
) -> Request:
    """Starts a broadcast into the tensor; `synchronize` returns it."""
    if process_set.coordinator and root_rank not in process_set.ranks:
        raise ValueError(f"root_rank is {root_rank}; the ranks are {process_set.ranks}")
    options = "", process_set.ranks.index(root_rank), 1.0, 1.0
    return issue("broadcast", [tensor], name, process_set, lambda _: tensor, options)


def broadcast_async(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Request:
    """Starts a broadcast; `synchronize` returns a new tensor."""
    return broadcast_async_(tensor.detach().clone(), *args, **kwargs)


broadcast_ = _waited(broadcast_async_, "Copies the tensor of ``root_rank`` into the given tensor, and returns it.")


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = WORLD) -> Any:
    """Returns the tensor of ``root_rank`` on every rank. Its gradient is the average on the root, elsewhere zero."""

    def backward(_: Request, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        average = allreduce(gradients[0], name=name and f"{name}.gradient", process_set=process_set)
        return [average if WORLD.rank() == root_rank else torch.zeros_like(average)]

    return _differentiable(lambda of: broadcast_async(of[0], root_rank, name, process_set), backward, [tensor])[0]


def barrier(process_set: ProcessSet = WORLD) -> None:
    """Waits until every rank of the set has called it."""
    issue("barrier", [torch.empty(0, device="cpu")], None, process_set).wait()


def join(device: int = -1) -> int:
    """Adds zeros to other ranks' reductions until all ranks have joined. Returns the rank that joined last."""
    return WORLD.coordinator.join()


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = WORLD
) -> Any:
    """Returns an object of one rank, on every rank."""
    is_root, name = WORLD.rank() == root_rank, name or "broadcast_object"
    data = _packed(obj) if is_root else torch.empty(0, dtype=torch.uint8, device="cpu")
    length = int(broadcast_(torch.tensor([len(data)], device="cpu"), root_rank, f"{name}.size", process_set))
    data = broadcast_(data if is_root else data.new_empty(length), root_rank, f"{name}.data", process_set)
    return obj if is_root else pickle.loads(to_bytes(data))


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = WORLD) -> list[Any]:
    """Returns every rank's object, in the order of ranks."""
    request = allgather_async(_packed(obj), name or "allgather_object", process_set)
    return [pickle.loads(to_bytes(part)) for part in torch.split(request.wait(), request.rows[0])]


def _packed(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)
