"""Files that grow while a run lives, its logs and events, on a disk; on an object store they are `pieces`."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import IO

from rankzero import store


@dataclass(frozen=True, order=True)
class Position:
    """How far what grows was read: whole pieces (on a disk there are none), and bytes of the current one."""

    piece: int = 0
    offset: int = 0


_READ = 4 << 20


def end_of(path: str) -> Position:
    """Where a growing file ends now."""
    with contextlib.suppress(FileNotFoundError):
        return Position(0, store.size(path))
    return Position()


def has_grown(path: str, position: Position) -> bool:
    """True if a local file is longer than what was read of it. A file server may be asked for sizes seldom."""
    try:
        return os.stat(path).st_size > position.offset
    except FileNotFoundError:
        return False


def read_lines(path: str, position: Position, end: Position | None = None) -> tuple[list[str], Position]:
    """Returns complete lines after ``position``, and the new position.

    Args:
        path: The file.
        position: How far it was read.
        end: The position at which this reader stops, though the file may have grown; None reads on.
    """
    size = _READ if end is None else min(_READ, end.offset - position.offset)
    if size <= 0:
        return [], position
    try:
        with open(path, "rb") as file:
            file.seek(position.offset)
            data = file.read(size)
            while data and b"\n" not in data and (more := file.read(_READ)):
                data += more
    except FileNotFoundError:
        return [], position
    whole = data.rfind(b"\n") + 1
    return data[:whole].decode("utf-8", "replace").split("\n")[:-1], Position(0, position.offset + whole)


class Appender:
    """Appends lines to a growing file.

    A line that was torn (by a full disk, or by the death of the driver before this one) ends where it was torn.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._torn = False

    def append(self, lines: list[str]) -> None:
        """Adds lines, which can be read at once. Raises OSError when there is no room for them."""
        data = ("\n".join(lines) + "\n").encode("utf-8", "replace") if lines else b""
        if self._file is None:
            self._file = open(self._path, "ab", buffering=0)
            self._torn = _ends_torn(self._path)
        rest = memoryview(b"\n" + data if self._torn else data)
        while rest:
            written = self._file.write(rest)
            self._torn = rest[written - 1] != _NEWLINE if written else self._torn
            rest = rest[written:]

    def close(self) -> None:
        """Closes the file."""
        if self._file:
            self._file.close()


_NEWLINE = ord("\n")


def _ends_torn(path: str) -> bool:
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
