"""Requests: the operations of ranks, what must be equal in them, and their errors."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

AVERAGE, SUM, MIN, MAX, PRODUCT = "Average", "Sum", "Min", "Max", "Product"


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
    dtype: str = ""
    shape: tuple[int, ...] = ()
    op: str = ""
    root: int = 0
    before: float = 1.0
    after: float = 1.0
    device: str = "cpu"

    def is_number(self) -> bool:
        """Returns True for the reduction of a number, such as a loss, which travels in the message with its name."""
        is_one = self.dtype in ("torch.float32", "torch.float64") and math.prod(self.shape) == 1
        return is_one and self.kind == "allreduce" and self.device == "cpu"

    def __str__(self) -> str:
        scale = f"prescale {self.before:g}, postscale {self.after:g}" if (self.before, self.after) != (1, 1) else ""
        parts = [self.kind, self.op, self.dtype, str(list(self.shape)), scale]
        parts += [f"of rank {self.root}" if self.kind == "broadcast" else "", self.device.replace("cpu", "")]
        return " ".join(filter(None, parts))


class Request:
    """An operation of this rank, and the caller's handle. A group is one operation with several ``tensors``.

    The coordinator's thread writes results into the tensors, or replaces them, and calls `end`. ``rows`` has the number
    of rows that came from each rank, for each gathered tensor. ``splits`` are the rows for each rank in an alltoall.
    ``finish`` makes the caller's result, once. ``memory`` has the addresses of the tensors' storages.
    """

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
            with contextlib.suppress(HorovodInternalError):
                self.wait()
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


def _record(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Returns an event on the current stream of each GPU that has tensors."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    return [torch.cuda.current_stream(device).record_event() for device in devices]
