"""`Exchange`: the data that the agent's thread and the channel's thread share, under one lock, and files on their way.

Standard library only: this module travels to executors.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import IO

from rankzero.channel import frames
from rankzero.channel.frames import FrameError, Message
from rankzero.channel.session import OWN, UPLOADS, Session, content_body, message_body


class ChannelClosed(ConnectionError):
    """The driver closed the channel or is lost for good."""


class Exchange:
    """The session, the files in transfer, the agent's messages, and a wake-up call in each direction."""

    def __init__(self) -> None:
        self.session = Session(frames.BULK_WINDOW, frames.FETCH_WINDOW)
        self.readable, self._notify = socket.socketpair()
        self.woken, self._wake = socket.socketpair()
        for end in (self.readable, self._notify, self.woken, self._wake):
            end.setblocking(False)
        self.give_up_at = float("inf")
        self._lock = threading.Lock()
        self._uploads: deque[Iterator[bytes]] = deque()
        self._fetches: dict[int, Fetch] = {}
        self._streams = 0
        self._is_woken = False
        self._inbox: list[Message] = []
        self._reason: str | None = None

    # -- for the agent's thread ----------------------------------------------------------------

    def collect(self) -> list[Message]:
        """Returns the messages that have arrived. Raises ChannelClosed once no more can arrive."""
        with self._lock:
            messages, self._inbox = self._inbox, []
            if self._reason is None:
                _drain(self.readable)
            elif not messages:
                raise ChannelClosed(self._reason)
            return messages

    def queue(self, body: bytes) -> None:
        """Puts a frame in the control lane."""
        with self._lock:
            self.session.queue(body)

    def queue_bulk(self, stream: int, body: bytes) -> None:
        """Puts a frame in a stream of the bulk lane."""
        with self._lock:
            self.session.queue_bulk(stream, body)

    def add_upload(self, name: str, path: str, then: Message) -> None:
        """Queues a file for upload, behind earlier ones."""
        with self._lock:
            self._streams += 1
            self._uploads.append(upload_frames(self._streams, name, path, then))

    def add_fetch(self, name: str, path: str) -> None:
        """Requests a file from the driver."""
        with self._lock:
            self._streams += 1
            self._fetches[self._streams] = Fetch(name, path)
            self.session.queue(message_body(OWN, {"type": "fetch", "stream": self._streams, "name": name}))

    def close_within(self, timeout: float) -> None:
        """Ends the channel's thread when everything has been delivered, or after ``timeout`` seconds."""
        self.give_up_at = time.monotonic() + timeout
        self.wake()

    def wake(self) -> None:
        """Wakes the channel's thread, so that it checks for new work."""
        with self._lock:
            if self._is_woken:
                return
            self._is_woken = True
        # The socket is closed if that thread has ended.
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def close(self) -> None:
        """Closes the agent's ends of the wake-up sockets."""
        self.readable.close()
        self._wake.close()

    # -- for the channel's thread --------------------------------------------------------------

    @property
    def is_closing(self) -> bool:
        """True once the agent has closed the channel."""
        return self.give_up_at != float("inf")

    @property
    def is_idle(self) -> bool:
        """True if every frame and file has been sent."""
        with self._lock:
            return self.session.is_idle and not self._uploads

    def woke(self) -> None:
        """Clears the wake-up call, so that later work sends a new one."""
        with self._lock:
            self._is_woken = False
            _drain(self.woken)

    def resume(self, received: int) -> None:
        """Continues the session on a new connection. Raises FrameError if the driver's count is impossible."""
        with self._lock:
            self.session.resume(received)

    def ping(self) -> None:
        """Sends the counts with the next frame."""
        with self._lock:
            self.session.ping()

    def take(self, body: bytes) -> bytes:
        """Counts a received frame and returns its type. Raises FrameError."""
        with self._lock:
            return self.session.take(body)

    def grant(self, size: int) -> None:
        """Gives the driver credit for accepted bulk bytes."""
        with self._lock:
            self.session.grant(size)

    def next_body(self) -> bytes | None:
        """Returns the body of the frame to send now, or None.

        At most one piece of a file waits, so files and logs take turns and no file is held in memory.
        """
        while True:
            with self._lock:
                upload = self._uploads[0] if self._uploads and self.session.wants(UPLOADS) else None
            # The disk is read outside the lock, so threads that queue messages do not wait for it.
            piece = next(upload, None) if upload else None
            with self._lock:
                if piece is not None:
                    self.session.queue_bulk(UPLOADS, piece)
                elif upload:
                    self._uploads.popleft()
                    continue
                return self.session.next()

    def fetch_of(self, stream: object) -> Fetch:
        """Returns the fetch that a stream belongs to. Raises FrameError if there is none."""
        with self._lock:
            fetch = self._fetches.get(stream) if isinstance(stream, int) else None
        if fetch is None:
            raise FrameError(f"a file that was not requested: stream {stream}")
        return fetch

    def end_fetch(self, stream: int) -> None:
        """Removes a fetch that has ended."""
        with self._lock:
            del self._fetches[stream]

    def deliver(self, message: Message) -> None:
        """Delivers a message to the agent."""
        with self._lock:
            if not self._inbox:
                self._call_agent()
            self._inbox.append(message)

    def end(self, reason: str) -> None:
        """Reports to the agent that the channel has ended, and abandons its files."""
        with self._lock:
            self._reason = reason
            self._call_agent()
            fetches = list(self._fetches.values())
            self._uploads.clear()
        for fetch in fetches:
            fetch.abandon()
        self._notify.close()
        self.woken.close()

    def _call_agent(self) -> None:
        with contextlib.suppress(OSError):
            self._notify.send(b"x")


def _drain(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while end.recv(frames.READ_SIZE):
            pass


def upload_frames(stream: int, name: str, path: str, then: Message) -> Iterator[bytes]:
    """Yields the frames of an upload, and reads the file only as they are needed.

    Args:
        stream: Number of the stream.
        name: The name that the driver gives to the file.
        path: The local file. If it cannot be read to its end, the driver receives the error.
        then: The message that follows the file.

    Yields:
        Bodies of frames, in order.
    """
    yield message_body(OWN, {"type": "upload", "stream": stream, "name": name})
    error = None
    try:
        with open(path, "rb", buffering=0) as file:
            while chunk := file.read(frames.CHUNK):
                yield content_body(stream, chunk)
    except (OSError, ValueError) as problem:
        error = f"{path} cannot be read: {problem}"
    yield message_body(OWN, {"type": "upload-end", "stream": stream, "error": error, "then": then})


class Fetch:
    """A file on its way from the driver to a local path."""

    def __init__(self, name: str, path: str) -> None:
        self._name = name
        self._path = path
        self._file: IO[bytes] | None = None
        self._error: str | None = None

    def write(self, data: memoryview) -> None:
        """Appends a piece of the file. After a full disk the rest is discarded, so that the channel continues."""
        if self._error is not None:
            return
        try:
            if self._file is None:
                self._file = open(self._path, "wb", buffering=0)
            while data:
                data = data[self._file.write(data) :]
        except (OSError, ValueError) as problem:
            self._fail(f"{self._path} cannot be written: {problem}")

    def finish(self, error: str | None) -> Message:
        """Returns the message that reports the end of the fetch; removes an incomplete file."""
        if error is not None:
            self._fail(error)
        self.write(memoryview(b""))
        if self._file is not None:
            self._file.close()
        if self._error is not None:
            return {"type": "fetched", "name": self._name, "error": self._error}
        return {"type": "fetched", "name": self._name, "path": self._path}

    def abandon(self) -> None:
        """Removes the incomplete file, because its rest will not arrive."""
        self._fail("the driver is lost")

    def _fail(self, error: str) -> None:
        self._error = self._error or error
        if self._file is not None:
            self._file.close()
            self._file = None
            with contextlib.suppress(OSError):
                os.unlink(self._path)
