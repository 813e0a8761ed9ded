"""Requests: the operations of ranks, what must be equal in them, and their errors."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

AVERAGE, SUM, MIN, MAX, PRODUCT = "Average", "Sum", "Min", "Max", "Product"

_OF_NUMBERS: dict[str, Callable[[list[float]], float]] = {
    AVERAGE: lambda numbers: sum(numbers) / len(numbers), SUM: sum, MIN: min, MAX: max, PRODUCT: math.prod,
}  # fmt: skip


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


class HostsUpdatedInterrupt(RuntimeError):
    """Horovod raises it when its world changes. It is never raised here, since a world lasts for an attempt."""


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


class Collective:
    """A collective under way. The first thread that waits for it stores its results by ``finish``.

    ``work`` is torch's handle, which keeps the connections open; ``tensors`` are those that are read and written.
    """

    def __init__(self, work: Any, finish: Callable[[], Any], tensors: Sequence[torch.Tensor]) -> None:
        self.work, self._finish, self._tensors = work, finish, list(tensors)
        self.is_finished, self._event, self._lock = False, None, threading.Lock()
        self._error: RuntimeError | None = None

    def is_completed(self) -> bool:
        """Returns True if `wait` would not wait."""
        work = self.work
        return work is None or bool(work.is_completed())

    def wait(self) -> None:
        """Waits until the results are stored; on a GPU the current stream waits. Raises torch's RuntimeError."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self.is_finished:
                return await_event(self._event, self._tensors)
            work = self.work  # `close` may take it away.
            try:
                if work is None:
                    raise RuntimeError("the connections were closed before the end of the operation")
                work.wait()
                await_event(None, self._tensors)
                self._finish()
            except RuntimeError as error:
                self._error, self.work = error, None
                raise
            self._event, self.is_finished, self.work = record(self._tensors), True, None
            self._finish, self._tensors = bool, [tensor for tensor in self._tensors if tensor.is_cuda]


class Request:
    """An operation of this rank, and the caller's handle. A group is one operation with several ``tensors``.

    Its collectives write into the tensors, or replace them by the results. ``rows`` has the number of rows that came
    from each rank, for each gathered tensor. ``splits`` are the rows for each rank in an alltoall. ``finish`` makes the
    caller's result, once. ``failed`` makes the error of an operation whose collective failed. ``memory`` has the
    addresses of the tensors' storages; of two operations that share one the second begins after the end of the first.
    """

    failed: Callable[[Exception, str], Exception]

    def __init__(
        self,
        name: str,
        metas: Sequence[Meta],
        tensors: Sequence[torch.Tensor],
        finish: Callable[[Request], Any] | None = None,
        splits: Sequence[int] = (),
    ) -> None:
        self.name, self.metas, self.splits = name, tuple(metas), list(splits)
        self.tensors, self.finish, self.since = list(tensors), finish, time.monotonic()
        self.memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.rows: list[list[int]] = []
        self.collectives: list[Collective] = []
        self.is_number = len(self.metas) == 1 and _is_number(self.metas[0])
        number = tensors[0].item() if self.is_number else 0.0
        self.payload = int.from_bytes(struct.pack("<d", number), "little", signed=True)
        self.key, self.digest = hashes(name, self.metas)
        self.event = record(self.tensors)
        self._error: Exception | None = None
        self._result: Any = self.tensors
        self._has_begun, self._waits = False, threading.Lock()
        self._waits.acquire()

    def begin(self, error: Exception | None = None) -> None:
        """Lets callers wait for the ``collectives``, or fail with an error."""
        if error is not None:
            self.collectives.clear()
        self._error, self._has_begun = error, True
        self._waits.release()

    def is_completed(self) -> bool:
        """Returns True if `wait` would not wait for other ranks."""
        return self._has_begun and all(one.is_completed() for one in self.collectives)

    def is_stored(self) -> bool:
        """Returns True if the results are in the tensors."""
        return self._has_begun and all(one.is_finished for one in self.collectives)

    def poll(self) -> bool:
        """Returns True if the operation has ended; its results are in the tensors then, or `wait` raises its error."""
        if is_completed := self.is_completed():
            with contextlib.suppress(HorovodInternalError):
                self.wait()
        return is_completed

    def wait(self) -> Any:
        """Waits for the end of the operation, and returns its result. Raises the error with which it failed."""
        with self._waits:
            if self._error is not None:
                raise type(self._error)(*self._error.args) from self._error
            try:
                for collective in self.collectives:
                    collective.wait()
            except RuntimeError as error:
                raise self.failed(error, self.name) from error
            if self.finish is not None:
                self._result, self.finish = self.finish(self), None
            return self._result

    __call__ = wait


def record(tensors: Sequence[torch.Tensor]) -> Any:
    """Returns an event on the current stream, for which another stream waits; None without a GPU."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    return None if device is None else torch.cuda.current_stream(device).record_event()


def await_event(event: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Makes the current stream wait for an event, and keeps the memory of the tensors until it has used them."""
    for tensor in tensors:
        if tensor.is_cuda:
            stream = torch.cuda.current_stream(tensor.device)
            if event is not None:
                stream.wait_event(event)
            tensor.record_stream(stream)


def _is_number(meta: Meta) -> bool:
    """Returns True for the reduction of a number, such as a loss, which travels in the message with its name."""
    is_one = meta.dtype in (torch.float32, torch.float64) and math.prod(meta.shape) == 1
    return is_one and meta.kind == "allreduce" and meta.device == "cpu"


class _Done:
    wait = is_completed = staticmethod(lambda: True)


def of_numbers(request: Request, payloads: Sequence[int]) -> Collective:
    """Returns the reduction of the numbers of all ranks, in the same order on each."""
    meta, tensor = request.metas[0], request.tensors[0]
    numbers = [struct.unpack("<d", bits.to_bytes(8, "little", signed=True))[0] * meta.before for bits in payloads]
    # As with several elements, a number that is too large for the type is infinite.
    found = torch.tensor(_OF_NUMBERS[meta.op](numbers) * meta.after, dtype=torch.float64, device="cpu")
    return Collective(_Done, torch.inference_mode(tensor.is_inference())(lambda: tensor.copy_(found)), [])
