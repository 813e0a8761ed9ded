"""Growing files on a disk: the logs and events of a run. On an object store they are stored in `pieces`."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import IO

from rankzero import store


@dataclass(frozen=True, order=True)
class Position:
    """A position in a growing file or stream: the piece, which is 0 on a disk, and the offset in it in bytes."""

    piece: int = 0
    offset: int = 0


READ = 4 << 20
"""Bytes of lines that a reader reads, of all ranks together; of each rank at least `READ_MIN`."""

READ_MIN = 64 << 10


def end_of(path: str) -> Position:
    """Returns the current end of a growing file."""
    with contextlib.suppress(FileNotFoundError):
        return Position(0, store.size(path))
    return Position()


def has_grown(path: str, position: Position) -> bool:
    """Returns True if a local file extends beyond a position. A file server may report an old size for seconds."""
    try:
        return os.stat(path).st_size > position.offset
    except FileNotFoundError:
        return False


def read_lines(
    path: str, position: Position, end: Position | None = None, most: int = READ
) -> tuple[list[str], Position]:
    """Returns complete lines after ``position``, and the new position.

    Args:
        path: The file.
        position: The position from which to read.
        end: The position at which to stop, although the file may be longer; None reads to the end of the file.
        most: Number of bytes to read, except for a longer line.
    """
    size = most if end is None else min(most, end.offset - position.offset)
    if size <= 0:
        return [], position
    try:
        with open(path, "rb") as file:
            file.seek(position.offset)
            data = file.read(size)
            while data and b"\n" not in data and (more := file.read(most)):
                data += more
    except FileNotFoundError:
        return [], position
    whole = data.rfind(b"\n") + 1
    return data[:whole].decode("utf-8", "replace").split("\n")[:-1], Position(0, position.offset + whole)


class Appender:
    """Appends lines to a growing file.

    A line that is incomplete, since the disk was full or an earlier driver died, is ended before the next one.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._torn = False

    def append(self, lines: list[str]) -> None:
        """Appends lines, which readers see immediately. Raises OSError if the disk is full."""
        data = ("\n".join(lines) + "\n").encode("utf-8", "replace") if lines else b""
        if self._file is None:
            self._file = self._open()
            self._torn = _ends_torn(self._path)
        rest = memoryview(b"\n" + data if self._torn else data)
        while rest:
            written = self._file.write(rest)
            self._torn = rest[written - 1] != _NEWLINE if written else self._torn
            rest = rest[written:]

    def _open(self) -> IO[bytes]:
        try:
            return open(self._path, "ab", buffering=0)
        except FileNotFoundError:
            # Some sites remove empty directories. The run directory itself must still be there.
            os.mkdir(os.path.dirname(self._path))
            return open(self._path, "ab", buffering=0)

    def close(self) -> None:
        """Closes the file, if it was opened."""
        if self._file:
            self._file.close()


_NEWLINE = ord("\n")


def _ends_torn(path: str) -> bool:
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
