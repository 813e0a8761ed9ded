"""Executes the operations on which all ranks have agreed, in the same order on each, with torch.distributed."""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from rankzero.compat.horovod.torch.coordinator import Coordinator
    from rankzero.compat.horovod.torch.requests import Meta, Request

AVERAGE, SUM, MIN, MAX, PRODUCT = "Average", "Sum", "Min", "Max", "Product"

LARGE = 1 << 20
"""Bytes from which a tensor is reduced alone, since copying it into a fused buffer would take longer than a message."""

FUSION_LIMIT = 64 << 20
"""Bytes of smaller tensors that are reduced together."""

_REDUCE = {
    AVERAGE: dist.ReduceOp.SUM, SUM: dist.ReduceOp.SUM, MIN: dist.ReduceOp.MIN, MAX: dist.ReduceOp.MAX,
    PRODUCT: dist.ReduceOp.PRODUCT,
}  # fmt: skip

_WIDER = {torch.int16: torch.int32}
"""Types that torch cannot reduce, each with the wider type in which it is reduced."""


class Running(NamedTuple):
    """A collective that was begun.

    Attributes:
        work: torch's handle of it.
        finish: Stores its results, after the wait for it.
        request: The operations that it belongs to; one more than once if it has several tensors in it.
        kept: Its tensors: gloo's thread, which may free them a moment later, must not be the last that refers to them.
        device: The device of its tensors.
    """

    work: Any
    finish: Callable[[], None]
    requests: list[Request]
    kept: Any
    device: torch.device


# -- GPUs: the coordinator has streams of its own ----------------------------------------------


def record(tensors: Sequence[torch.Tensor]) -> Any:
    """Returns an event on the caller's stream, for which the coordinator's stream waits; None without a GPU."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    return None if device is None else torch.cuda.current_stream(device).record_event()


def await_event(event: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Makes the current stream wait for an event, and keeps the memory of the tensors until it has used them."""
    for tensor in tensors if event is not None else ():
        if tensor.is_cuda:
            stream = torch.cuda.current_stream(tensor.device)
            stream.wait_event(event)
            tensor.record_stream(stream)


@contextlib.contextmanager
def _stream(group: Coordinator, device: torch.device) -> Iterator[None]:
    """Makes the coordinator's stream of a GPU the current one; does nothing for other devices."""
    if device.type != "cuda":
        yield
        return
    if device not in group.streams:
        group.streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(group.streams[device]):
        yield


# -- what needs no collective of its own -------------------------------------------------------


def may_join(meta: Meta) -> bool:
    """Returns True for an operation that a rank which has joined can take part in."""
    return meta.kind == "barrier" or (meta.kind == "allreduce" and meta.op in (SUM, AVERAGE))


def neutral(meta: Meta) -> torch.Tensor:
    """Returns the zeros that a rank which has joined adds to a sum."""
    device = f"cuda:{torch.cuda.current_device()}" if meta.device == "cuda" else meta.device
    return torch.zeros(meta.shape, dtype=meta.dtype, device=device)


def is_number(meta: Meta) -> bool:
    """Returns True for the reduction of a number, such as a loss, which travels in the message with its name."""
    is_one = meta.dtype in (torch.float32, torch.float64) and math.prod(meta.shape) == 1
    return is_one and meta.kind == "allreduce" and meta.device == "cpu"


def packed(tensor: torch.Tensor) -> int:
    """Returns the bits of a number."""
    return int.from_bytes(struct.pack("<d", tensor.item()), "little", signed=True)


_OF_NUMBERS: dict[str, Callable[[list[float]], float]] = {
    AVERAGE: lambda numbers: sum(numbers) / len(numbers), SUM: sum, MIN: min, MAX: max, PRODUCT: math.prod,
}  # fmt: skip


def reduce_numbers(meta: Meta, tensor: torch.Tensor, payloads: Sequence[int]) -> None:
    """Reduces the numbers of all ranks, in the same order on each."""
    numbers = [struct.unpack("<d", bits.to_bytes(8, "little", signed=True))[0] * meta.before for bits in payloads]
    tensor.fill_(_OF_NUMBERS[meta.op](numbers) * meta.after)


# -- collectives -------------------------------------------------------------------------------


def run(group: Coordinator, requests: Sequence[Request]) -> None:
    """Begins the collectives of all operations before it waits for the first one."""
    group.batch = running = []
    for request in requests:
        for tensor in request.tensors:
            with _stream(group, tensor.device):
                await_event(request.event, [tensor])
        if request.metas[0].kind == "barrier":
            group.complete(request)
    for device, parts in _fused(requests):
        with _stream(group, device):
            running.append(_reduce(group, parts))
    for request in requests:
        if request.metas[0].kind == "broadcast":
            with _stream(group, request.tensors[0].device):
                running.append(_broadcast(group, request))
    if moved := [request for request in requests if request.metas[0].kind in ("allgather", "alltoall")]:
        _move(group, moved, running)
    for each in running:
        with _stream(group, each.device):
            if each.work is not None:
                each.work.wait()
            each.finish()
            for request in each.requests:
                request.left -= 1
                if request.left == 0:
                    request.event = record(request.tensors)
                    group.complete(request)


Part = tuple["Meta", torch.Tensor, "Request"]


def _fused(requests: Sequence[Request]) -> Iterator[tuple[torch.device, list[Part]]]:
    """Yields the tensors to reduce together. All ranks yield the same, since only facts that all have decide."""
    kinds: dict[Any, list[Part]] = {}
    for request in requests:
        if request.metas[0].kind not in ("allreduce", "reducescatter"):
            continue
        for meta, tensor in zip(request.metas, request.tensors, strict=True):
            if tensor.nbytes >= LARGE:
                yield tensor.device, [(meta, tensor, request)]
                continue
            kind = (meta.dtype, *meta[3:])
            together = kinds.setdefault(kind, [])
            if sum(other.nbytes for _, other, _ in together) + tensor.nbytes > FUSION_LIMIT:
                yield together[0][1].device, kinds.pop(kind)
                together = kinds.setdefault(kind, [])
            together.append((meta, tensor, request))
    for together in kinds.values():
        yield together[0][1].device, together


def _reduce(group: Coordinator, parts: list[Part]) -> Running:
    meta, tensors = parts[0][0], [tensor for _, tensor, _ in parts]
    is_one = len(tensors) == 1 and tensors[0].is_contiguous()
    flat = tensors[0].view(-1) if is_one else torch.cat([tensor.reshape(-1) for tensor in tensors])
    flat = flat.to(_WIDER.get(flat.dtype, flat.dtype))
    if meta.before != 1.0:
        flat.copy_(_scaled(flat, meta.before))
    options = dist.AllreduceOptions()
    options.reduceOp = _REDUCE[meta.op]
    sent = torch.view_as_real(flat) if flat.is_complex() else flat
    work = group.group(flat.device).allreduce([sent], options)

    def finish() -> None:
        total = _after(flat, meta, group.size)
        if not is_one or total.data_ptr() != tensors[0].data_ptr():
            for tensor, part in zip(tensors, total.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    return Running(work, finish, [request for _, _, request in parts], (sent, flat), flat.device)


def _after(total: torch.Tensor, meta: Meta, size: int) -> torch.Tensor:
    if meta.op == AVERAGE:
        # Averages of integers are truncated, as in Horovod.
        is_real = total.is_floating_point() or total.is_complex()
        total = total.div_(size) if is_real else torch.div(total, size, rounding_mode="trunc")
    return _scaled(total, meta.after) if meta.after != 1.0 else total


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Returns a tensor times a factor, in the tensor's type. Integers are multiplied in float64, as in Horovod."""
    is_real = tensor.is_floating_point() or tensor.is_complex()
    return ((tensor if is_real else tensor.double()) * factor).to(tensor.dtype)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a tensor as bytes, so that types that torch cannot send are sent, too."""
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # `view` fails for a single element with an arbitrary stride.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def _broadcast(group: Coordinator, request: Request) -> Running:
    (tensor,), options = request.tensors, dist.BroadcastOptions()
    options.rootRank, data = request.metas[0].root, _bytes(tensor)
    work = group.group(data.device).broadcast([data], options) if len(data) else None

    def finish() -> None:
        if data.data_ptr() != tensor.data_ptr():
            tensor.copy_(data.view(tensor.dtype).view(tensor.shape))

    return Running(work, finish, [request], data, data.device)


def _move(group: Coordinator, requests: Sequence[Request], running: list[Running]) -> None:
    """Begins gathers and alltoalls. One message sends the numbers of rows of all of them to all ranks."""
    counts: list[int] = []
    for request in requests:
        gathered = [len(tensor) for tensor in request.tensors for _ in range(group.size)]
        counts += request.splits if request.metas[0].kind == "alltoall" else gathered
    mine = torch.tensor(counts, dtype=torch.int64, device="cpu")
    every = mine.new_empty(group.size * len(mine))
    group.control._allgather_base(every, mine).wait()
    received = every.view(group.size, -1, group.size)[:, :, group.rank].t().tolist()
    for request in requests:
        for index, tensor in enumerate(request.tensors):
            request.rows.append(received.pop(0))
            begin = _alltoall if request.metas[0].kind == "alltoall" else _allgather
            with _stream(group, tensor.device):
                running.append(begin(group, request, index, request.rows[-1]))


def _allgather(group: Coordinator, request: Request, index: int, rows: list[int]) -> Running:
    tensor = request.tensors[index]
    row = math.prod(tensor.shape[1:]) * tensor.element_size()
    mine, longest = _bytes(tensor), max(rows) * row
    if len(mine) < longest:
        mine = torch.cat([mine, mine.new_zeros(longest - len(mine))])
    found = [torch.empty_like(mine) for _ in rows]
    work = group.group(mine.device).allgather([found], [mine]) if longest else None

    def finish() -> None:
        whole = torch.cat([part[: count * row] for part, count in zip(found, rows, strict=True)])
        request.tensors[index] = whole.view(tensor.dtype).view(sum(rows), *tensor.shape[1:])

    return Running(work, finish, [request], (mine, found), mine.device)


def _alltoall(group: Coordinator, request: Request, index: int, rows: list[int]) -> Running:
    tensor = request.tensors[index]
    row = math.prod(tensor.shape[1:]) * tensor.element_size()
    output, mine = tensor.new_empty((sum(rows), *tensor.shape[1:])), _bytes(tensor)
    arriving, leaving = ([count * row for count in counts] for counts in (rows, request.splits))
    filled = _bytes(output)
    work = group.group(mine.device).alltoall_base(filled, mine, arriving, leaving)

    def finish() -> None:
        request.tensors[index] = output

    return Running(work, finish, [request], (mine, filled), mine.device)
