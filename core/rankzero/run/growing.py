"""Files that grow while a run lives, its logs and events: one file locally, numbered pieces on a URL."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import IO

from rankzero import store


@dataclass(frozen=True)
class Position:
    """How far a growing file was read: whole pieces, and bytes of the current one."""

    piece: int = 0
    offset: int = 0


_READ = 4 << 20
_MANY_LINES = 100_000


def end_of(location: str) -> Position:
    """Where a growing file ends now."""
    if store.is_url(location):
        return Position(len(store.list_names(location)), 0)
    with contextlib.suppress(FileNotFoundError):
        return Position(0, store.size(location))
    return Position()


def has_grown(path: str, position: Position) -> bool:
    """True if a local file is longer than what was read of it. A file server may be asked for sizes seldom."""
    try:
        return os.stat(path).st_size > position.offset
    except FileNotFoundError:
        return False


def read_lines(location: str, position: Position) -> tuple[list[str], Position]:
    """Complete lines after ``position``, and the new position."""
    if not store.is_url(location):
        return _read_file(location, position)
    lines: list[str] = []
    with contextlib.suppress(FileNotFoundError):
        while len(lines) < _MANY_LINES:
            text = store.read_bytes(store.join(location, _piece(position.piece))).decode("utf-8", "replace")
            lines += text.split("\n")[:-1]
            position = Position(position.piece + 1, 0)
    return lines, position


def _read_file(path: str, position: Position) -> tuple[list[str], Position]:
    try:
        with open(path, "rb") as file:
            file.seek(position.offset)
            data = file.read(_READ)
            while data and b"\n" not in data and (more := file.read(_READ)):
                data += more
    except FileNotFoundError:
        return [], position
    end = data.rfind(b"\n") + 1
    return data[:end].decode("utf-8", "replace").split("\n")[:-1], Position(0, position.offset + end)


class Appender:
    """Appends lines to a growing file of a run: one file locally, numbered pieces on a URL.

    A line that was torn (by a full disk, or by the death of the driver before this one) ends where it was torn.
    """

    def __init__(self, location: str) -> None:
        self._location = location
        self._is_remote = store.is_url(location)
        self._file: IO[bytes] | None = None
        self._torn = False
        self._waiting: list[bytes] = []
        self._piece: int | None = None

    def append(self, lines: list[str]) -> None:
        """Adds lines; locally they can be read at once. Raises OSError when there is no room for them."""
        data = ("\n".join(lines) + "\n").encode("utf-8", "replace") if lines else b""
        if self._is_remote:
            if sum(map(len, self._waiting)) + len(data) > WAITING_LIMIT:
                raise OSError(f"{self._location} takes no lines, and {WAITING_LIMIT} bytes wait already")
            self._waiting.append(data)
            return
        if self._file is None:
            self._file = open(self._location, "ab", buffering=0)
            self._torn = _ends_torn(self._location)
        rest = memoryview(b"\n" + data if self._torn else data)
        while rest:
            written = self._file.write(rest)
            self._torn = rest[written - 1] != _NEWLINE if written else self._torn
            rest = rest[written:]

    def flush(self) -> None:
        """Writes what waits for an object store as the next piece. Lines may be added meanwhile; one caller only."""
        waiting = list(self._waiting)
        if data := b"".join(waiting):
            if self._piece is None:
                # Behind what earlier submissions wrote.
                self._piece = len(store.list_names(self._location))
            store.write_bytes(store.join(self._location, _piece(self._piece)), data)
            self._piece += 1
            del self._waiting[: len(waiting)]

    def close(self) -> None:
        """Writes what is left."""
        self.flush()
        if self._file:
            self._file.close()


def _piece(number: int) -> str:
    return f"{number:08d}"


WAITING_LIMIT = 64 << 20
"""Bytes of lines that may wait for an object store which does not take them."""

_NEWLINE = ord("\n")


def _ends_torn(path: str) -> bool:
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
