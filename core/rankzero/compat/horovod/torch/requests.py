"""`Requests`: what one rank has issued, and not got."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from rankzero.compat.horovod.torch import execute
from rankzero.compat.horovod.torch.errors import HorovodInternalError
from rankzero.compat.horovod.torch.messages import Handle, Meta, Request


class Requests:
    """By name. Any thread may issue; the one that carries out a round takes them.

    Args:
        mutex: Is held by each method.
    """

    def __init__(self, mutex: threading.Lock) -> None:
        self._mutex = mutex
        self._calls: Counter[str] = Counter()
        self._open: dict[str, Request] = {}
        self._new: list[Request] = []
        self.failed: HorovodInternalError | None = None
        """Why nothing more can be issued."""

    def __bool__(self) -> bool:
        return bool(self._open)

    def count_call(self, kind: str) -> int:
        """The number of a call without a name, from 1."""
        with self._mutex:
            self._calls[kind] += 1
            return self._calls[kind]

    def forget_calls(self) -> None:
        """Counts from 1 again."""
        with self._mutex:
            self._calls.clear()

    def issue(self, request: Request) -> Handle:
        """Notes an operation. Raises ValueError if its name is on its way already, or what failed before."""
        with self._mutex:
            if self.failed:
                raise self.failed
            name = request.full_name
            if name in self._open:
                raise ValueError(
                    f"{request.meta.kind} of {name!r} was issued again before it had ended: synchronize it "
                    "first, or give each tensor a name of its own"
                )
            self._open[name] = request
            self._new.append(request)
        return request.handle

    def new(self) -> list[Request]:
        """Those that no round has told the other ranks of."""
        with self._mutex:
            found, self._new = self._new, []
        return found

    def take(self, name: str, meta: Meta) -> Request:
        """The one of a name that all ranks have issued; zeros of a rank that has joined."""
        with self._mutex:
            request = self._open.pop(name, None)
        return request or Request(name, 0, meta, execute.neutral(meta))

    def remove(self, requests: Sequence[Request]) -> None:
        """Takes several."""
        with self._mutex:
            for request in requests:
                del self._open[request.full_name]

    def names(self) -> list[str]:
        """Of all."""
        with self._mutex:
            return sorted(self._open)

    def fail(self, error: HorovodInternalError) -> None:
        """Ends all, and what is issued from now on."""
        with self._mutex:
            self.failed = error
            waiting = [request.handle for request in self._open.values()]
            self._open.clear()
            self._new.clear()
        for handle in waiting:
            handle.finish(error=error)
