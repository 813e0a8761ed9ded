"""Operations: what must be equal in them, the caller's handle, errors, and their collectives on torch's groups."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

AVERAGE, SUM, MIN, MAX, PRODUCT = "Average", "Sum", "Min", "Max", "Product"

LARGE = 1 << 20
"""Bytes from which a tensor is reduced alone, since copying it into a fused buffer would take longer than a message."""

SHORT = 1 << 10
"""Bytes of a message of a cycle; what is longer needs a second one."""

FUSION_LIMIT = 64 << 20
"""Bytes of smaller tensors that are reduced together."""


class HorovodInternalError(RuntimeError):
    """A collective failed: a rank has died, or ranks do not agree; docs/errors.md#horovodinternalerror explains it."""


class MismatchError(HorovodInternalError, ValueError):
    """Ranks issued the same name for different things; names them. docs/errors.md#mismatcherror explains it."""


class StallError(HorovodInternalError, TimeoutError):
    """Ranks wait for something that another one does not issue; names it. docs/errors.md#stallerror explains it."""


class HostsUpdatedInterrupt(RuntimeError):
    """An error of Horovod that is never raised: scripts catch it, and here the world changes between attempts only."""


class Meta(NamedTuple):
    """The properties of an operation that must be equal on all ranks."""

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    op: str = ""
    root: int = 0
    before: float = 1.0
    after: float = 1.0
    device: str = "cpu"

    def zeros(self, gpu: torch.device) -> torch.Tensor:
        """Returns the zeros that a rank which has joined adds to a sum, on its GPU if the others' are on theirs."""
        device = gpu if self.device == "cuda" else self.device
        return torch.zeros(self.shape, dtype=getattr(torch, self.dtype.removeprefix("torch.")), device=device)

    def __str__(self) -> str:
        scale = f"prescale {self.before:g}, postscale {self.after:g}" if (self.before, self.after) != (1, 1) else ""
        parts = [self.kind, self.op, self.dtype, str(list(self.shape)), scale]
        parts += [f"of rank {self.root}" if self.kind == "broadcast" else "", self.device.replace("cpu", "")]
        return " ".join(filter(None, parts))


class Request:
    """An operation of this rank, and the caller's handle. A group is one operation with several ``tensors``.

    The coordinator's thread writes results into the tensors, or replaces them, and calls `end`. ``rows`` has the number
    of rows that came from each rank, for each gathered tensor. ``splits`` are the rows for each rank in an alltoall.
    ``finish`` makes the caller's result, once. ``memory`` has the `_place` of each tensor that is not empty.
    """

    def __init__(
        self, name: str, metas: Sequence[Meta], tensors: Sequence[torch.Tensor], finish: Any = None, splits: Any = ()
    ) -> None:
        self.name, self.metas, self.splits = name, tuple(metas), list(splits)
        self.finish: Callable[[Request], Any] | None = finish
        self.tensors, self.since = list(tensors), time.monotonic()
        self.memory = [_place(name, *pair) for pair in zip(metas, tensors, strict=False) if pair[1].numel()]
        self.rows: list[list[int]] = []
        self.has_ended = False
        self._events = _record(self.tensors)
        self._error: Exception | None = None
        self._result: Any = self.tensors
        self._waits = threading.Lock()
        self._waits.acquire()

    def end(self, error: Exception | None = None) -> None:
        """Lets the caller have the results, or the error. The results may still be under way on the current stream."""
        if error is None:
            self._events = _record(self.tensors)
        self._error, self.has_ended = error, True
        self._waits.release()

    def number(self) -> float | None:
        """Returns the number to reduce, such as a loss, which travels in the message with its name; else None."""
        meta = self.metas[0]
        is_one = len(self.metas) == math.prod(meta.shape) == 1 and meta.dtype in ("torch.float32", "torch.float64")
        return self.tensors[0].item() if is_one and meta.kind == "allreduce" and meta.device == "cpu" else None

    def await_tensors(self) -> None:
        """Makes the current stream of a GPU wait for the tensors, and keeps their memory until it has used them."""
        for event in self._events:
            torch.cuda.current_stream(event.device).wait_event(event)
        for tensor in self.tensors:
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def poll(self) -> bool:
        """Returns True if the operation has ended; its results are in the tensors then, or `wait` raises its error."""
        if self.has_ended:
            self.await_tensors()
        return self.has_ended

    def wait(self) -> Any:
        """Waits for the end of the operation, and returns its result. Raises the error with which it failed."""
        with self._waits:
            if self._error is not None:
                raise type(self._error)(*self._error.args) from self._error
            self.await_tensors()
            if self.finish is not None:
                self._result, self.finish = self.finish(self), None
            return self._result

    __call__ = wait


def _place(name: str, meta: Meta, tensor: torch.Tensor) -> tuple[int, tuple[int, int, str]]:
    """Returns the storage, and first byte, end and use; equal uses of the same bytes may go on at the same time."""
    # Several operations may read a tensor, or receive it from one rank, such as tied weights.
    use = {"allreduce": name, "broadcast": f"broadcast {meta.root}"}.get(meta.kind, "read")
    span = 1 + sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return tensor.untyped_storage().data_ptr(), (start, start + span * tensor.element_size(), use)


def _record(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Returns an event on the current stream of each GPU that has tensors."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    return [torch.cuda.current_stream(device).record_event() for device in devices]


class Connections:
    """The process groups of a set: gloo's, and on GPUs a second communicator.

    Neither is torch's own group, since users may have collectives of theirs under way. ``rank`` is the index of this
    rank in the set, -1 if it is not a member; ``timeout`` the seconds after which a collective fails.
    """

    def __init__(self, store: Any, rank: int, ranks: Sequence[int], timeout: float) -> None:
        self.rank, self.size, limit = rank, len(ranks), timedelta(seconds=timeout)
        # Ranks that are no members must create it, too.
        self._accelerated: Any = dist.new_group(ranks, timeout=limit) if dist.get_backend() != "gloo" else None
        self._streams: dict[torch.device, Any] = {}
        if rank < 0:
            return
        gloo: Any = dist.ProcessGroupGloo
        names = filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
        options = gloo._Options()
        options._timeout, options._threads = limit, 2
        options._devices = [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]
        # Not registered with torch.distributed, whose references would keep the connections of a failed rank open.
        self.gloo: Any = gloo(store, rank, self.size, options)

    def close(self, is_failed: bool) -> None:
        """Closes the connections, so that no rank waits for this one.

        gloo joins its threads when nothing refers to its group. One that frees a tensor after Python has finalized
        aborts the process ("terminate called without an active exception").
        """
        self.gloo = None
        accelerated, self._accelerated = self._accelerated, None
        if accelerated is not None and dist.is_initialized():
            if is_failed:
                accelerated.abort()
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(accelerated)

    def execute(self, requests: Sequence[Request], end: Callable[[Request], None]) -> None:
        """Executes operations that all ranks have issued, in one order; ``end`` is called when all have been done."""
        tensors = [tensor for request in requests for tensor in request.tensors]
        with self._stream(next((tensor.device for tensor in tensors if tensor.is_cuda), None)):
            for request in requests:
                request.await_tensors()
            finishes = [self._reduce(parts) for parts in _fused(requests)]
            finishes += [self._broadcast(request) for request in requests if request.metas[0].kind == "broadcast"]
            finishes += self._move([one for one in requests if one.metas[0].kind in ("allgather", "alltoall")])
            for finish in finishes:
                finish()
            for request in requests:
                end(request)

    def gather(self, mine: bytes) -> list[bytes]:
        """Returns the bytes of all ranks: by one message if each has few, else by two."""
        sent = len(mine).to_bytes(8, "little") + mine
        found = self._gather(sent[:SHORT].ljust(SHORT))
        sizes = [int.from_bytes(each[:8], "little") for each in found]
        if max(sizes) > SHORT - 8:
            found = self._gather(sent.ljust(8 + max(sizes)))
        return [each[8 : 8 + size] for each, size in zip(found, sizes, strict=True)]

    def _gather(self, data: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        found = mine.new_empty(self.size * len(mine))
        self.gloo._allgather_base(found, mine).wait()
        return [to_bytes(each) for each in found.view(self.size, -1)]

    def _stream(self, device: torch.device | None) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which the set's own stream of a GPU is the current one."""
        if device is None:
            return contextlib.nullcontext()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._streams[device])

    def _group(self, tensor: torch.Tensor) -> Any:
        return self._accelerated if tensor.is_cuda and self._accelerated is not None else self.gloo

    def _reduce(self, parts: list[tuple[Meta, torch.Tensor]]) -> Callable[[], None]:
        meta, tensors = parts[0][0], [tensor for _, tensor in parts]
        is_one = len(tensors) == 1 and tensors[0].is_contiguous()
        flat = tensors[0].view(-1) if is_one else torch.cat([tensor.reshape(-1) for tensor in tensors])
        _scale(flat, meta.before, 1)
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, "SUM" if meta.op == AVERAGE else meta.op.upper())
        work = self._group(flat).allreduce([flat], options)

        def finish() -> None:
            work.wait()
            _scale(flat, meta.after, self.size if meta.op == AVERAGE else 1)
            if not is_one:
                results = torch.split(flat, [tensor.numel() for tensor in tensors])
                for tensor, part in zip(tensors, results, strict=True):
                    tensor.copy_(part.view(tensor.shape))

        return finish

    def _broadcast(self, request: Request) -> Callable[[], None]:
        (tensor,), options = request.tensors, dist.BroadcastOptions()
        options.rootRank, data = request.metas[0].root, _bytes(tensor)
        work = self._group(data).broadcast([data], options)

        def finish() -> None:
            work.wait()
            if data.data_ptr() != tensor.data_ptr():
                tensor.copy_(data.view(tensor.dtype).view(tensor.shape))

        return finish

    def _move(self, requests: Sequence[Request]) -> Iterator[Callable[[], None]]:
        """Begins alltoalls, and gathers as alltoalls of copies; one message for all has the numbers of rows."""
        parts = [(request, index) for request in requests for index in range(len(request.tensors))]
        if not parts:
            return
        splits = [request.splits or [len(request.tensors[index])] * self.size for request, index in parts]
        every = [pickle.loads(each) for each in self.gather(pickle.dumps(splits))]
        for number, (request, index) in enumerate(parts):
            tensor, rows = request.tensors[index], [of[number][self.rank] for of in every]
            request.rows.append(rows)
            mine = _bytes(tensor) if request.splits else _bytes(tensor).repeat(self.size)
            row = math.prod(tensor.shape[1:]) * tensor.element_size()
            with torch.inference_mode(False):
                output = tensor.new_empty((sum(rows), *tensor.shape[1:]))
            arriving, leaving = [count * row for count in rows], [count * row for count in splits[number]]
            work = self._group(mine).alltoall_base(_bytes(output), mine, arriving, leaving)

            def finish(request: Request = request, index: int = index, work: Any = work, output: Any = output) -> None:
                work.wait()
                request.tensors[index] = output

            yield finish


def _fused(requests: Sequence[Request]) -> Iterator[list[tuple[Meta, torch.Tensor]]]:
    """Yields the tensors to reduce together. All ranks yield the same, since only facts that all have decide."""
    kinds: dict[Any, list[tuple[Meta, torch.Tensor]]] = {}
    for meta, tensor in (part for one in requests for part in zip(one.metas, one.tensors, strict=True)):
        if meta.kind not in ("allreduce", "reducescatter"):
            continue
        if tensor.nbytes >= LARGE:
            yield [(meta, tensor)]
            continue
        kind = (meta.dtype, *meta[3:])
        if sum(other.nbytes for _, other in kinds.get(kind, [])) + tensor.nbytes > FUSION_LIMIT:
            yield kinds.pop(kind)
        kinds.setdefault(kind, []).append((meta, tensor))
    yield from kinds.values()


def _scale(flat: torch.Tensor, factor: float, divisor: int) -> None:
    """Scales in place. Integers are scaled in float64 and cut off once."""
    if flat.is_floating_point():
        if divisor > 1:
            flat.div_(divisor)
        if factor != 1.0:
            flat.mul_(factor)
    elif factor != 1.0:
        flat.copy_(flat.double() * factor / divisor)
    elif divisor > 1:
        flat.div_(divisor, rounding_mode="trunc")


def to_bytes(tensor: torch.Tensor) -> bytes:
    """Returns the memory of a tensor of bytes on the CPU; numpy may not be there."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a tensor as bytes, so that types that torch cannot send are sent, too."""
    whole = tensor.detach().contiguous()
    # `view` fails for a single element with an arbitrary stride.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
