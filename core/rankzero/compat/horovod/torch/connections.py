"""`Connections`: torch's process groups of a process set, and the collectives of what all ranks have agreed on."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rankzero.compat.horovod.torch.requests import AVERAGE, Collective, Meta, Request, await_event

LARGE = 1 << 20
"""Bytes from which a tensor is reduced alone, since copying it into a fused buffer would take longer than a message."""

FUSION_LIMIT = 64 << 20
"""Bytes of smaller tensors that are reduced together."""

Part = tuple[Meta, torch.Tensor, Request]
"""A tensor of a request, and its properties."""


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
        self._users: weakref.WeakValueDictionary[int, Request] = weakref.WeakValueDictionary()
        """The operation that has begun last on each memory; earlier ones have ended."""
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

        gloo joins its threads when nothing refers to the group any more. They end before Python finalizes, since one
        that frees a tensor of Python after that aborts the process ("terminate called without an active exception").
        """
        for request in self._users.values() if is_failed else ():
            for collective in request.collectives:
                collective.work = None
        self.gloo = None
        accelerated, self._accelerated = self._accelerated, None
        if accelerated is not None and dist.is_initialized():
            if is_failed and hasattr(accelerated, "abort"):
                accelerated.abort()
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(accelerated)

    def begin(self, requests: Sequence[Request]) -> None:
        """Begins the collectives of operations that all ranks have issued, in one order."""
        moved = [request for request in requests if request.metas[0].kind in ("allgather", "alltoall")]
        for request in requests:
            before = [found for found in map(self._users.get, request.memory) if found is not None]
            for tensor in request.tensors:
                with self._stream(tensor.device):
                    for collective in (one for earlier in before for one in earlier.collectives):
                        collective.wait()
                    await_event(request.event, [tensor])
        for parts in _fused(requests):
            with self._stream(parts[0][1].device):
                collective = self._reduce(parts)
            for _, _, request in parts:
                request.collectives.append(collective)
        for request in requests:
            if request.metas[0].kind == "broadcast":
                with self._stream(request.tensors[0].device):
                    request.collectives.append(self._broadcast(request))
        counts = self._count(moved) if moved else []
        for request in moved:
            begin = self._alltoall if request.metas[0].kind == "alltoall" else self._allgather
            for index, tensor in enumerate(request.tensors):
                request.rows.append(counts.pop(0))
                with self._stream(tensor.device):
                    request.collectives.append(begin(request, index, request.rows[-1]))
        for request in requests:
            self._users.update(dict.fromkeys(request.memory, request))

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        """Returns the bytes of all ranks."""
        sizes = [int(size) for size in self._gather(torch.tensor([len(mine)], device="cpu"))]
        found = self._gather(torch.frombuffer(bytearray(mine.ljust(max(sizes))), dtype=torch.uint8))
        return [to_bytes(part)[:size] for part, size in zip(found, sizes, strict=True)]

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        found = mine.new_empty(self.size * len(mine))
        self.gloo._allgather_base(found, mine).wait()
        return list(found.view(self.size, -1))

    @contextlib.contextmanager
    def _stream(self, device: torch.device) -> Iterator[None]:
        """Makes the set's own stream of a GPU the current one; does nothing for other devices."""
        if device.type == "cuda" and device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._streams[device]) if device.type == "cuda" else contextlib.nullcontext():
            yield

    def _group(self, tensor: torch.Tensor) -> Any:
        return self._accelerated if tensor.is_cuda and self._accelerated is not None else self.gloo

    def _reduce(self, parts: list[Part]) -> Collective:
        meta, tensors = parts[0][0], [tensor for _, tensor, _ in parts]
        is_one = len(tensors) == 1 and tensors[0].is_contiguous()
        flat = tensors[0].view(-1) if is_one else torch.cat([tensor.reshape(-1) for tensor in tensors])
        is_whole = not (flat.is_floating_point() or flat.is_complex())
        if meta.before != 1.0:
            is_one, flat = False, ((flat.double() if is_whole else flat) * meta.before).to(flat.dtype)
        options, sent = dist.AllreduceOptions(), torch.view_as_real(flat) if flat.is_complex() else flat
        options.reduceOp = getattr(dist.ReduceOp, "SUM" if meta.op == AVERAGE else meta.op.upper())

        @torch.inference_mode(any(tensor.is_inference() for tensor in tensors))
        def finish() -> None:
            divisor = self.size if meta.op == AVERAGE else 1
            if is_whole and meta.after != 1.0:
                # Integers are scaled in float64 and cut off once.
                flat.copy_(flat.double() * meta.after / divisor)
            elif divisor > 1:
                flat.div_(divisor, rounding_mode="trunc" if is_whole else None)
            if not is_whole and meta.after != 1.0:
                flat.mul_(meta.after)
            if not is_one:
                results = torch.split(flat, [tensor.numel() for tensor in tensors])
                for tensor, part in zip(tensors, results, strict=True):
                    tensor.copy_(part.view(tensor.shape))

        return Collective(self._group(flat).allreduce([sent], options), finish, [flat])

    def _broadcast(self, request: Request) -> Collective:
        (tensor,), options = request.tensors, dist.BroadcastOptions()
        options.rootRank, data = request.metas[0].root, _bytes(tensor)

        @torch.inference_mode(tensor.is_inference())
        def finish() -> None:
            if data.data_ptr() != tensor.data_ptr():
                tensor.copy_(data.view(tensor.dtype).view(tensor.shape))

        return Collective(self._group(data).broadcast([data], options), finish, [data])

    def _count(self, requests: Sequence[Request]) -> list[list[int]]:
        """Returns how many rows come from each rank, for each tensor of gathers and alltoalls; one message for all."""
        counts: list[int] = []
        for request in requests:
            gathered = [len(tensor) for tensor in request.tensors for _ in range(self.size)]
            counts += request.splits if request.metas[0].kind == "alltoall" else gathered
        every = torch.stack(self._gather(torch.tensor(counts, dtype=torch.int64, device="cpu")))
        received: list[list[int]] = every.view(self.size, -1, self.size)[:, :, self.rank].t().tolist()
        return received

    def _allgather(self, request: Request, index: int, rows: list[int]) -> Collective:
        tensor = request.tensors[index]
        row, mine = _row_bytes(tensor), _bytes(tensor)
        if len(mine) < (longest := max(rows) * row):
            mine = torch.cat([mine, mine.new_zeros(longest - len(mine))])
        found = [torch.empty_like(mine) for _ in rows]

        def finish() -> None:
            whole = torch.cat([part[: count * row] for part, count in zip(found, rows, strict=True)])
            request.tensors[index] = whole.view(tensor.dtype).view(sum(rows), *tensor.shape[1:])

        return Collective(self._group(mine).allgather([found], [mine]), finish, [mine, *found])

    def _alltoall(self, request: Request, index: int, rows: list[int]) -> Collective:
        tensor, row = request.tensors[index], _row_bytes(request.tensors[index])
        mine, output = _bytes(tensor), tensor.new_empty((sum(rows), *tensor.shape[1:]))
        arriving, leaving, filled = [count * row for count in rows], [n * row for n in request.splits], _bytes(output)
        work = self._group(mine).alltoall_base(filled, mine, arriving, leaving)
        return Collective(work, lambda: request.tensors.__setitem__(index, output), [mine, output])


def _fused(requests: Sequence[Request]) -> Iterator[list[Part]]:
    """Yields the tensors to reduce together. All ranks yield the same, since only facts that all have decide."""
    kinds: dict[Any, list[Part]] = {}
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


def to_bytes(tensor: torch.Tensor) -> bytes:
    """Returns the memory of a tensor of bytes on the CPU; numpy may not be there."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a tensor as bytes, so that types that torch cannot send are sent, too."""
    whole = tensor.detach().contiguous()
    # `view` fails for a single element with an arbitrary stride.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def _row_bytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape[1:]) * tensor.element_size()
