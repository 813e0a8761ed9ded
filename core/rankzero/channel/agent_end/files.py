"""Files on the agent's side: uploads are read as the window allows, fetches are written as they arrive.

Standard library only: this module travels to executors.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import IO

from rankzero.channel import frames
from rankzero.channel.frames import Message
from rankzero.channel.session import OWN, content_body, message_body


def upload_frames(stream: int, name: str, path: str, then: Message, like: str) -> Iterator[bytes]:
    """Yields the frames of an upload, and reads the file only as they are needed.

    Args:
        stream: Number of the stream.
        name: The name that the driver gives to the file.
        path: The local file. If it cannot be read to its end, the driver receives the error.
        then: The message that follows the file.
        like: A digest whose algorithm the driver uses for the file.

    Yields:
        Bodies of frames, in order.
    """
    yield message_body(OWN, {"type": "upload", "stream": stream, "name": name, "like": like})
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
