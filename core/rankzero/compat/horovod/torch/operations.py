"""Operations: the requests of ranks, the errors, and the execution of what all ranks have agreed on."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import math
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

AVERAGE, SUM, MIN, MAX, PRODUCT = "Average", "Sum", "Min", "Max", "Product"

LARGE = 1 << 20
"""Bytes from which a tensor is reduced alone, since copying it into a fused buffer would take longer than a message."""

FUSION_LIMIT = 64 << 20
"""Bytes of smaller tensors that are reduced together."""

_REDUCE = {
    AVERAGE: dist.ReduceOp.SUM, SUM: dist.ReduceOp.SUM, MIN: dist.ReduceOp.MIN, MAX: dist.ReduceOp.MAX,
    PRODUCT: dist.ReduceOp.PRODUCT,
}  # fmt: skip

_OF_NUMBERS: dict[str, Callable[[list[float]], float]] = {
    AVERAGE: lambda numbers: sum(numbers) / len(numbers), SUM: sum, MIN: min, MAX: max, PRODUCT: math.prod,
}  # fmt: skip

_WIDER = {torch.int16: torch.int32}
"""Types that torch cannot reduce, each with the wider type in which it is reduced."""


class HorovodInternalError(RuntimeError):
    """A collective failed: a rank has died, or ranks do not agree.

    Its messages, their causes and what to do: docs/errors.md#horovodinternalerror
    """


class MismatchError(HorovodInternalError, ValueError):
    """Ranks issued the same name for different things; names them.

    Its messages, their causes and what to do: docs/errors.md#mismatcherror
    """


class StallError(HorovodInternalError, TimeoutError):
    """Ranks wait for something that another one does not issue; names it, and the ranks.

    Its messages, their causes and what to do: docs/errors.md#stallerror
    """


class Meta(NamedTuple):
    """The properties of an operation that must be equal on all ranks."""

    kind: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    op: str = ""
    root: int = 0
    before: float = 1.0
    after: float = 1.0
    device: str = "cpu"

    def __str__(self) -> str:
        scale = f"prescale {self.before:g}, postscale {self.after:g}" if (self.before, self.after) != (1, 1) else ""
        parts = [self.kind, self.op, str(self.dtype or ""), str(list(self.shape)), scale]
        parts += [f"of rank {self.root}" if self.kind == "broadcast" else "", self.device.replace("cpu", "")]
        return " ".join(filter(None, parts))


@functools.lru_cache(maxsize=8192)
def hashes(name: str, metas: tuple[Meta, ...]) -> tuple[int, int]:
    """Returns 64 bits for the name and 64 bits for the rest, the same in every process."""
    digests = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in (name, repr(metas)))
    first, second = (int.from_bytes(digest, "little", signed=True) for digest in digests)
    return first, second


class Request:
    """An operation of this rank, and the caller's handle. A group is one operation with several ``tensors``.

    The coordinator writes into the tensors, or replaces them by the results, and sets ``rows``, the number of rows that
    came from each rank for each gathered tensor. ``finish`` makes the caller's result, once, in the thread that waits.
    ``splits`` are the rows for each rank in an alltoall; ``waiters`` has an entry for each thread that waits.
    """

    def __init__(
        self,
        name: str,
        metas: Sequence[Meta],
        tensors: Sequence[torch.Tensor],
        finish: Callable[[Request], Any] = lambda request: request.tensors,
        splits: Sequence[int] = (),
    ) -> None:
        self.name, self.metas, self.splits = name, tuple(metas), list(splits)
        self.tensors: list[torch.Tensor] = list(tensors)
        self.finish: Callable[[Request], Any] | None = finish
        self.since, self.left = time.monotonic(), len(self.tensors)
        self.rows: list[list[int]] = []
        self.waiters: list[None] = []
        self.is_number = len(self.metas) == 1 and is_number(self.metas[0])
        self.payload = packed(self.tensors[0]) if self.is_number else 0
        self.key, self.digest = hashes(name, self.metas)
        self.event = record(self.tensors)
        self.error: Exception | None = None
        self._result: Any = None
        self._is_done, self._running = False, threading.Lock()
        self._running.acquire()

    def end(self, error: Exception | None = None) -> None:
        """Ends the wait of callers, with a result or with an error."""
        self.error, self._is_done = error, True
        self._running.release()

    def poll(self) -> bool:
        """Returns True if `wait` would not wait."""
        return self._is_done

    def wait(self) -> Any:
        """Waits for the end of the operation, and returns its result. Raises the error with which it failed."""
        self.waiters.append(None)
        try:
            with self._running:
                pass
        finally:
            self.waiters.pop()
        if self.error is not None:
            raise type(self.error)(*self.error.args) from self.error
        await_event(self.event, self.tensors)
        if self.finish is not None:
            self._result, self.finish = self.finish(self), None
        return self._result

    __call__ = wait


class Running(NamedTuple):
    """A collective that was begun: torch's handle, the function that stores its results, its requests and tensors.

    The tensors are kept, since gloo's thread, which may free them later, must not be the last that refers to them.
    """

    work: Any
    finish: Callable[[], None]
    requests: list[Request]
    tensors: list[torch.Tensor]


class Group(Protocol):
    """The coordinator that executes an operation, with its connections."""

    rank: int
    size: int
    control: Any
    streams: dict[torch.device, Any]
    batch: list[Running]

    def group(self, device: torch.device) -> Any:
        """Returns torch's process group for tensors on a device."""

    def complete(self, request: Request) -> None:
        """Ends an operation of this rank."""


def record(tensors: Sequence[torch.Tensor]) -> Any:
    """Returns an event on the current stream, for which another stream waits; None without a GPU."""
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
def _stream(group: Group, device: torch.device) -> Iterator[None]:
    """Makes the coordinator's own stream of a GPU the current one; does nothing for other devices."""
    if device.type == "cuda" and device not in group.streams:
        group.streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(group.streams[device]) if device.type == "cuda" else contextlib.nullcontext():
        yield


def may_join(meta: Meta) -> bool:
    """Returns True for an operation that a rank which has joined can take part in."""
    return meta.kind == "barrier" or (meta.kind == "allreduce" and meta.op in (SUM, AVERAGE))


def neutral(meta: Meta, gpu: torch.device) -> torch.Tensor:
    """Returns the zeros that a rank which has joined adds to a sum, on its GPU if the others' are on theirs."""
    return torch.zeros(meta.shape, dtype=meta.dtype, device=gpu if meta.device == "cuda" else meta.device)


def is_number(meta: Meta) -> bool:
    """Returns True for the reduction of a number, such as a loss, which travels in the message with its name."""
    is_one = meta.dtype in (torch.float32, torch.float64) and math.prod(meta.shape) == 1
    return is_one and meta.kind == "allreduce" and meta.device == "cpu"


def packed(tensor: torch.Tensor) -> int:
    """Returns the bits of a number."""
    return int.from_bytes(struct.pack("<d", tensor.item()), "little", signed=True)


def reduce_numbers(request: Request, payloads: Sequence[int]) -> None:
    """Reduces the numbers of all ranks, in the same order on each."""
    meta, tensor = request.metas[0], request.tensors[0]
    numbers = [struct.unpack("<d", bits.to_bytes(8, "little", signed=True))[0] * meta.before for bits in payloads]
    # As with several elements, a number that is too large for the type is infinite.
    tensor.copy_(torch.tensor(_OF_NUMBERS[meta.op](numbers) * meta.after, dtype=torch.float64, device="cpu"))


def _gather(group: Group, mine: torch.Tensor) -> list[torch.Tensor]:
    found = mine.new_empty(group.size * len(mine))
    work = group.control._allgather_base(found, mine)
    group.batch.append(Running(work, lambda: None, [], [found, mine]))
    work.wait()
    return list(found.view(group.size, -1))


def gather_bytes(group: Group, mine: bytes) -> list[bytes]:
    """Returns the bytes of all ranks."""
    sizes = [int(size) for size in _gather(group, torch.tensor([len(mine)], device="cpu"))]
    found = _gather(group, torch.frombuffer(bytearray(mine.ljust(max(sizes))), dtype=torch.uint8))
    return [to_bytes(part)[:size] for part, size in zip(found, sizes, strict=True)]


def to_bytes(tensor: torch.Tensor) -> bytes:
    """Returns the memory of a tensor of bytes on the CPU; numpy may not be there."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def run(group: Group, requests: Sequence[Request]) -> None:
    """Begins the collectives of all operations before it waits for the first one."""
    running: list[Running] = group.batch
    moved = [request for request in requests if request.metas[0].kind in ("allgather", "alltoall")]
    for request in requests:
        for tensor in request.tensors:
            with _stream(group, tensor.device):
                await_event(request.event, [tensor])
        if request.metas[0].kind == "barrier":
            group.complete(request)
    for parts in _fused(requests):
        with _stream(group, parts[0][1].device):
            running.append(_reduce(group, parts))
    for request in requests:
        if request.metas[0].kind == "broadcast":
            with _stream(group, request.tensors[0].device):
                running.append(_broadcast(group, request))
    counts = _count(group, moved) if moved else []
    for request in moved:
        for index, tensor in enumerate(request.tensors):
            request.rows.append(counts.pop(0))
            begin = _alltoall if request.metas[0].kind == "alltoall" else _allgather
            with _stream(group, tensor.device):
                running.append(begin(group, request, index, request.rows[-1]))
    for each in list(running):
        with _stream(group, each.tensors[0].device):
            each.work.wait()
            each.finish()
            for request in each.requests:
                request.left -= 1
                if request.left == 0:
                    request.event = record(request.tensors)
                    group.complete(request)


def _fused(requests: Sequence[Request]) -> Iterator[list[tuple[Meta, torch.Tensor, Request]]]:
    """Yields the tensors to reduce together. All ranks yield the same, since only facts that all have decide."""
    kinds: dict[Any, list[tuple[Meta, torch.Tensor, Request]]] = {}
    for request in requests:
        for meta, tensor in zip(request.metas, request.tensors, strict=True):
            if meta.kind not in ("allreduce", "reducescatter"):
                continue
            kind = (meta.dtype, *meta[3:])
            together = kinds.get(kind, [])
            if sum(other.nbytes for _, other, _ in together) + tensor.nbytes > FUSION_LIMIT and together:
                yield kinds.pop(kind)
            if tensor.nbytes >= LARGE:
                yield [(meta, tensor, request)]
            else:
                kinds.setdefault(kind, []).append((meta, tensor, request))
    yield from kinds.values()


def _reduce(group: Group, parts: list[tuple[Meta, torch.Tensor, Request]]) -> Running:
    meta, tensors = parts[0][0], [tensor for _, tensor, _ in parts]
    is_one = len(tensors) == 1 and tensors[0].is_contiguous()
    flat = tensors[0].view(-1) if is_one else torch.cat([tensor.reshape(-1) for tensor in tensors])
    flat = flat.to(_WIDER.get(flat.dtype, flat.dtype))
    if meta.before != 1.0:
        flat.copy_(_scaled(flat, meta.before))
    options, sent = dist.AllreduceOptions(), torch.view_as_real(flat) if flat.is_complex() else flat
    options.reduceOp = _REDUCE[meta.op]  # type: ignore[assignment]
    work = group.group(flat.device).allreduce([sent], options)

    def finish() -> None:
        total = flat
        if meta.op == AVERAGE:
            # Averages of integers are truncated, as in Horovod.
            total = flat.div_(group.size) if _is_real(flat) else torch.div(flat, group.size, rounding_mode="trunc")
        total = _scaled(total, meta.after) if meta.after != 1.0 else total
        if not is_one or total.data_ptr() != tensors[0].data_ptr():
            for tensor, part in zip(tensors, torch.split(total, [tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    return Running(work, finish, [request for _, _, request in parts], [sent])


def _is_real(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Returns a tensor times a factor, in the tensor's type. Integers are multiplied in float64, as in Horovod."""
    return ((tensor if _is_real(tensor) else tensor.double()) * factor).to(tensor.dtype)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a tensor as bytes, so that types that torch cannot send are sent, too."""
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # `view` fails for a single element with an arbitrary stride.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def _broadcast(group: Group, request: Request) -> Running:
    (tensor,), options = request.tensors, dist.BroadcastOptions()
    options.rootRank, data = request.metas[0].root, _bytes(tensor)
    work = group.group(data.device).broadcast([data], options)

    def finish() -> None:
        if data.data_ptr() != tensor.data_ptr():
            tensor.copy_(data.view(tensor.dtype).view(tensor.shape))

    return Running(work, finish, [request], [data])


def _count(group: Group, requests: Sequence[Request]) -> list[list[int]]:
    """Returns how many rows come from each rank, for each tensor of gathers and alltoalls; one message for all."""
    counts: list[int] = []
    for request in requests:
        gathered = [len(tensor) for tensor in request.tensors for _ in range(group.size)]
        counts += request.splits if request.metas[0].kind == "alltoall" else gathered
    every = torch.stack(_gather(group, torch.tensor(counts, dtype=torch.int64, device="cpu")))
    received: list[list[int]] = every.view(group.size, -1, group.size)[:, :, group.rank].t().tolist()
    return received


def _row_bytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def _allgather(group: Group, request: Request, index: int, rows: list[int]) -> Running:
    tensor = request.tensors[index]
    row, mine = _row_bytes(tensor), _bytes(tensor)
    if len(mine) < (longest := max(rows) * row):
        mine = torch.cat([mine, mine.new_zeros(longest - len(mine))])
    found = [torch.empty_like(mine) for _ in rows]
    work = group.group(mine.device).allgather([found], [mine])

    def finish() -> None:
        whole = torch.cat([part[: count * row] for part, count in zip(found, rows, strict=True)])
        request.tensors[index] = whole.view(tensor.dtype).view(sum(rows), *tensor.shape[1:])

    return Running(work, finish, [request], [mine, *found])


def _alltoall(group: Group, request: Request, index: int, rows: list[int]) -> Running:
    tensor, splits = request.tensors[index], request.splits
    row, mine, output = _row_bytes(tensor), _bytes(tensor), tensor.new_empty((sum(rows), *tensor.shape[1:]))
    arriving, leaving, filled = [count * row for count in rows], [count * row for count in splits], _bytes(output)
    work = group.group(mine.device).alltoall_base(filled, mine, arriving, leaving)
    return Running(work, lambda: request.tensors.__setitem__(index, output), [request], [mine, filled])
