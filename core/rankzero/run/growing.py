"""Growing files, to which lines are appended: the logs and events of a run.

On a disk each is one file. An object store cannot append: there all ranks write into one stream of pieces, the last of
which is rewritten while it is small, so that the number of requests does not depend on the number of ranks. Each line
of a stream begins with its ``[rank]``. ``status.json`` records the end of a stream, so that readers do not request
pieces that do not exist.
"""

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
    """Returns the current end of a growing file on a disk, or of a stream that is no longer written."""
    if store.is_url(path):
        return Position(len(store.list_names(path)), 0)
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


PIECE = 1 << 20
"""Bytes after which the next piece begins. Smaller pieces make more objects, larger ones are uploaded more often."""

WAITING_LIMIT = 64 << 20
"""Most bytes of lines that wait in memory while the object store rejects them."""


class PieceWriter:
    """Appends lines to a stream, after those of earlier submissions. One thread appends, and another one flushes."""

    def __init__(self, location: str) -> None:
        """Makes a writer; `flush` accesses the store.

        Args:
            location: URL of the stream's folder.
        """
        self._location = location
        self._waiting: list[bytes] = []
        self._piece: int | None = None
        self._content = b""

    @property
    def written(self) -> Position:
        """Returns the end of the stream, up to which it can be read."""
        return Position() if self._piece is None else Position(self._piece, len(self._content))

    def append(self, lines: list[str]) -> None:
        """Queues lines for `flush`. Raises OSError if more than `WAITING_LIMIT` bytes would wait."""
        data = ("\n".join(lines) + "\n").encode("utf-8", "replace") if lines else b""
        if sum(map(len, self._waiting)) + len(data) > WAITING_LIMIT:
            raise OSError(f"{self._location} takes no lines, and {WAITING_LIMIT} bytes wait already")
        self._waiting.append(data)

    def flush(self) -> None:
        """Writes the queued lines in one request; only one thread may call it. Lines stay queued if the write fails."""
        waiting = list(self._waiting)
        data = b"".join(waiting)
        if not data:
            return
        # Only acknowledged writes decide where the lines go: if a reply is lost, the same piece is written again.
        if self._piece is None:
            self._piece = end_of(self._location).piece
        piece, content = self._piece, self._content
        if len(content) >= PIECE:
            piece, content = piece + 1, b""
        store.write_bytes(_piece_name(self._location, piece), content + data)
        self._piece, self._content = piece, content + data
        del self._waiting[: len(waiting)]


def read_piece(location: str, position: Position, end: Position | None) -> tuple[list[str], Position]:
    """Returns lines of one piece after ``position``, and the new position.

    Args:
        location: URL of the stream's folder.
        position: The position to read from.
        end: The end of the stream according to the status, which saves requests; None finds the end in the store.
    """
    piece, offset = position.piece, position.offset
    while end is None or Position(piece, offset) < end:
        try:
            data = _read_from(_piece_name(location, piece), offset)
        except FileNotFoundError:
            break
        has_next = end is None or piece < end.piece
        if data:
            lines = data.decode("utf-8", "replace").split("\n")[:-1]
            return lines, Position(piece + 1) if end and has_next else Position(piece, offset + len(data))
        if not has_next:
            break
        piece, offset = piece + 1, 0
    return [], position


def begin_of_last(location: str, start: Position, end: Position, most: int) -> tuple[Position, int]:
    """Returns the position of the last bytes between two positions, and the number of bytes before it.

    Args:
        location: URL of the stream's folder, which is listed if there is more than one piece between the two.
        start: The first of the two positions.
        end: The second of the two positions.
        most: The number of bytes to keep. Returns ``start`` and 0 if there are no more bytes than these.
    """
    sizes = store.sizes(location) if start.piece < end.piece else {}
    parts = []
    for piece in range(start.piece, end.piece + 1):
        first = start.offset if piece == start.piece else 0
        last = end.offset if piece == end.piece else sizes.get(f"{piece:08d}", 0)
        parts.append((piece, first, max(first, last)))
    before = sum(last - first for _, first, last in parts) - most
    if before <= 0:
        return start, 0
    skipped = before
    for piece, first, last in parts:
        if skipped < last - first:
            return Position(piece, first + skipped), before
        skipped -= last - first
    return end, before


def _read_from(location: str, offset: int) -> bytes:
    # Reads one known byte more, since a range that begins at the end of an object is an error.
    return store.read_from(location, offset - 1)[1:] if offset else store.read_bytes(location)


def _piece_name(location: str, piece: int) -> str:
    return store.join(location, f"{piece:08d}")
