"""`Requests`: the operations that one rank has issued and that have not finished."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from rankzero.compat.horovod.torch import execute
from rankzero.compat.horovod.torch.errors import HorovodInternalError
from rankzero.compat.horovod.torch.messages import Handle, Meta, Request


class Requests:
    """The unfinished operations of a rank, by name. Any thread may issue one; the thread that runs a round takes them.

    Args:
        mutex: Lock that each method holds.
    """

    def __init__(self, mutex: threading.Lock) -> None:
        self._mutex = mutex
        self._calls: Counter[str] = Counter()
        self._open: dict[str, Request] = {}
        self._new: list[Request] = []
        self.failed: HorovodInternalError | None = None
        """The error because of which no more operations can be issued."""

    def __bool__(self) -> bool:
        return bool(self._open)

    def count_call(self, kind: str) -> int:
        """Returns the number of a call without a name, from 1."""
        with self._mutex:
            self._calls[kind] += 1
            return self._calls[kind]

    def forget_calls(self) -> None:
        """Resets the numbers of calls without a name to 1."""
        with self._mutex:
            self._calls.clear()

    def issue(self, request: Request) -> Handle:
        """Adds an operation. Raises ValueError if one of its name has not finished, or an earlier failure's error."""
        with self._mutex:
            if self.failed:
                raise self.failed
            name = request.full_name
            if name in self._open:
                raise ValueError(
                    f"{request.meta.kind} of {name!r} was issued again before it had ended: synchronize it "
                    "first, or give each tensor its own name"
                )
            self._open[name] = request
            self._new.append(request)
        return request.handle

    def new(self) -> list[Request]:
        """Returns the operations that no round has sent to the other ranks yet, once."""
        with self._mutex:
            found, self._new = self._new, []
        return found

    def take(self, name: str, meta: Meta) -> Request:
        """Removes and returns the operation of a name that all ranks have issued; zeros if this rank has joined."""
        with self._mutex:
            request = self._open.pop(name, None)
        return request or Request(name, 0, meta, execute.neutral(meta))

    def remove(self, requests: Sequence[Request]) -> None:
        """Removes several operations that are being executed."""
        with self._mutex:
            for request in requests:
                del self._open[request.full_name]

    def names(self) -> list[str]:
        """Returns the sorted names of all operations."""
        with self._mutex:
            return sorted(self._open)

    def fail(self, error: HorovodInternalError) -> None:
        """Fails all operations with an error, also those that are issued later."""
        with self._mutex:
            self.failed = error
            waiting = [request.handle for request in self._open.values()]
            self._open.clear()
            self._new.clear()
        for handle in waiting:
            handle.finish(error=error)
