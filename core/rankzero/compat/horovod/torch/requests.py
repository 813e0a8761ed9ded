"""`Request`: an operation that a rank has issued, and the handle by which callers wait for it. Its errors."""

from __future__ import annotations

import functools
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from rankzero.compat.horovod.torch import execute


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


@functools.lru_cache(maxsize=65536)
def hashes(name: str, metas: tuple[Meta, ...]) -> tuple[int, int]:
    """Returns 64 bits for the name and 64 bits for the rest, the same in every process."""
    digests = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in (name, repr(metas)))
    first, second = (int.from_bytes(digest, "little", signed=True) for digest in digests)
    return first, second


class Request:
    """An operation of this rank, and the caller's handle. A group is one operation with several tensors.

    Args:
        name: Name by which ranks match the operation.
        metas: Properties of each tensor that must be equal on all ranks.
        tensors: This rank's tensors. The coordinator writes into them, or replaces them by the results.
        finish: Makes the caller's result of the request; called once, in the thread that waits.
        splits: Number of rows for each rank in an alltoall.

    Attributes:
        rows: Number of rows that came from each rank, for each gathered tensor.
        waiters: One entry for each thread that waits for any operation of the coordinator.
    """

    def __init__(
        self,
        name: str,
        metas: Sequence[Meta],
        tensors: Sequence[torch.Tensor],
        finish: Callable[[Request], Any] = lambda request: request.tensors,
        splits: Sequence[int] = (),
    ) -> None:
        self.name, self.metas, self.tensors, self.splits = name, tuple(metas), list(tensors), list(splits)
        self.finish: Callable[[Request], Any] | None = finish
        self.since, self.left = time.monotonic(), len(self.tensors)
        self.rows: list[list[int]] = []
        self.waiters: list[None] = []
        self.is_number = len(self.metas) == 1 and execute.is_number(self.metas[0])
        self.payload = execute.packed(self.tensors[0]) if self.is_number else 0
        self.key, self.digest = hashes(name, self.metas)
        self.event = execute.record(self.tensors)
        self.error: Exception | None = None
        self._result: Any = None
        self._running = threading.Lock()
        self._running.acquire()

    def end(self, error: Exception | None = None) -> None:
        """Ends the wait of callers, with a result or with an error."""
        self.error = error
        self._running.release()

    def poll(self) -> bool:
        """Returns True if `wait` would not wait."""
        return not self._running.locked()

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
        execute.await_event(self.event, self.tensors)
        if self.finish is not None:
            self._result, self.finish = self.finish(self), None
        return self._result

    __call__ = wait
