"""Files on the driver's side, read and written in threads, so that a slow store does not stall the loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import IO, TypeVar

from rankzero import store
from rankzero.channel import frames
from rankzero.channel.frames import FrameError, Message
from rankzero.values.digest import Digest

T = TypeVar("T")


class Uploads:
    """Writes the uploads of one agent to a directory, one file after the other.

    A file is written beside its final name, and the driver renames it when it commits. After a full disk the rest is
    read and discarded, so that the channel continues.
    """

    def __init__(
        self, directory: str, task: int, deliver: Callable[[Message], None], grant: Callable[[int], None]
    ) -> None:
        """Prepares to receive files; nothing is written yet.

        Args:
            directory: Directory of the files, which are called ``.upload-{task}-{name}``.
            task: Number of the agent.
            deliver: Receives the message ``uploaded`` of each file, and the message that follows the file.
            grant: Receives the sizes of the frames whose content is on disk.
        """
        self._directory = directory
        self._task = task
        self._deliver = deliver
        self._grant = grant
        self._stream: int | None = None
        self._steps: deque[Callable[[], Awaitable[None]]] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._when_idle: Callable[[], None] | None = None
        self._name = self._path = ""
        self._file: IO[bytes] | None = None
        self._problem: str | None = None

    def begin(self, message: Message) -> None:
        """Handles the announcement of a file. Raises FrameError if it is malformed."""
        stream, name = message.get("stream"), message.get("name")
        if self._stream is not None or type(stream) is not int or not isinstance(name, str):
            raise FrameError("a malformed announcement of an upload")
        self._stream = stream
        self._add(partial(self._open, name))

    def content(self, stream: int, data: memoryview, size: int) -> None:
        """Handles a piece of the announced file. Raises FrameError if it belongs to another."""
        if stream != self._stream:
            raise FrameError("file content that was not announced")
        self._add(partial(self._write, data, size))

    def end(self, message: Message) -> None:
        """Handles the end of the file. Raises FrameError if it is malformed."""
        error, then = message.get("error"), frames.check_message(message.get("then"))
        if self._stream is None or message.get("stream") != self._stream or not isinstance(error, str | None):
            raise FrameError("a malformed end of an upload")
        self._stream = None
        self._add(partial(self._finish, error, then))

    def when_idle(self, act: Callable[[], None]) -> None:
        """Calls ``act`` as soon as every file that has arrived is on disk."""
        if self._worker is None:
            act()
        else:
            self._when_idle = act

    def abandon(self) -> None:
        """Removes the incomplete file, because its rest will not arrive."""
        if self._stream is not None:
            self._add(self._discard)

    def _add(self, step: Callable[[], Awaitable[None]]) -> None:
        self._steps.append(step)
        if self._worker is None:
            self._worker = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        while self._steps:
            await self._steps.popleft()()
        self._worker = None
        if self._when_idle:
            self._when_idle()

    async def _open(self, name: str) -> None:
        self._name, self._problem, self._file = name, None, None
        self._digest = Digest()
        self._path = os.path.join(self._directory, f".upload-{self._task}-{name}")
        if not name or name.startswith(".") or "/" in name or os.sep in name or "\0" in name:
            self._problem = f"{name!r} is no plain file name"
            return
        try:
            self._file = await _in_thread(lambda: open(self._path, "wb", buffering=0))
        except Exception as error:
            self._problem = f"{type(error).__name__}: {error}"

    async def _write(self, data: memoryview, size: int) -> None:
        if self._problem is None:
            try:
                await _in_thread(partial(self._write_all, data))
            except Exception as error:
                self._problem = f"{type(error).__name__}: {error}"
        self._grant(size)

    def _write_all(self, data: memoryview) -> None:
        assert self._file is not None
        self._digest.update(data)
        while data:
            data = data[self._file.write(data) :]

    async def _finish(self, error: str | None, then: Message) -> None:
        try:
            if self._file is not None:
                self._file.close()
        except OSError as refused:
            # A file server may report a full disk only now.
            self._problem = self._problem or str(refused)
        problem = self._problem or error
        uploaded: Message = {"type": "uploaded", "name": self._name, "path": None, "error": problem}
        if problem is not None:
            await self._discard()
        elif self._file is not None:
            facts = {"digest": self._digest.text(), "size": self._digest.size}
            uploaded = {"type": "uploaded", "name": self._name, "path": self._path, **facts}
            self._file = None
        self._deliver(uploaded)
        self._deliver(then)

    async def _discard(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
            with contextlib.suppress(OSError):
                os.unlink(self._path)


async def _in_thread(action: Callable[[], T]) -> T:
    """Runs an action in a thread; in this one if there are no more threads.

    After the main thread has ended, or at the limit of processes, Python starts none: the message that follows a file
    must still arrive.
    """
    todo = [action]

    def run() -> T:
        return todo.pop()()

    try:
        return await asyncio.to_thread(run)
    except RuntimeError:
        if not todo:
            raise
        return run()


async def read_offered(location: str | None, put: Callable[[bytes], Awaitable[None]]) -> str | None:
    """Reads a file that agents may fetch, piece by piece.

    Args:
        location: Its path or URL; None if there is no such file.
        put: Receives each piece and returns when there is room for the next.

    Returns:
        None, or the reason why the file could not be read to its end.
    """
    if location is None:
        return "no such file is offered"
    try:
        left = await _in_thread(partial(store.size, location))
        file = await _in_thread(partial(store.open_read, location))
        try:
            while chunk := await _in_thread(partial(file.read, frames.CHUNK)):
                left -= len(chunk)
                await put(chunk)
        finally:
            await asyncio.shield(_in_thread(file.close))
    # Drivers of object stores raise exceptions of their own types. The agent receives any of them as text.
    except Exception as error:
        return f"{location}: {error or type(error).__name__}"
    return None if left == 0 else f"{location}: it changed while it was read"
