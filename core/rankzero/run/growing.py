"""Growing files, to which lines are appended: the lines and events of a submission.

On a disk each is one file. An object store cannot append: there it is a folder of pieces, the last of which is
rewritten while it is small. ``status.json`` records the end, so that readers do not request pieces that do not exist.
A `Stream` is read through all submissions of a training, each of which has a growing file of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import IO

from rankzero import store


@dataclass(frozen=True, order=True)
class Position:
    """A position in a stream.

    Attributes:
        submission: Which submission of the training, from 0.
        piece: The piece of its growing file; 0 on a disk.
        offset: The offset in bytes.
    """

    submission: int = 0
    piece: int = 0
    offset: int = 0


READ = 4 << 20
"""Bytes of lines that a reader reads in one access."""


class Stream:
    """The growing files of one name in the folders of a training's submissions, one after the other."""

    def __init__(self, locations: Sequence[str]) -> None:
        """Makes a stream; reading accesses the store.

        Args:
            locations: The growing files, that of the last submission last. Earlier ones do not grow any more.
        """
        self._locations = locations
        self.is_remote = store.is_url(locations[-1])
        self.start = Position(len(locations) - 1)
        """The beginning of the last submission's lines."""

    def end(self, written: Sequence[int] = ()) -> Position:
        """Returns the current end.

        Args:
            written: On an object store, piece and offset of the end according to the status.
        """
        if self.is_remote:
            return Position(self.start.submission, *written)
        with contextlib.suppress(FileNotFoundError):
            return replace(self.start, offset=store.size(self._locations[-1]))
        return self.start

    def read(self, position: Position, end: Position | None = None) -> tuple[list[str], Position]:
        """Returns some complete lines after ``position``, and the new position; no lines at the end.

        Args:
            position: The position from which to read.
            end: The position at which to stop, which saves requests to an object store; None finds the end.
        """
        while True:
            location = self._locations[position.submission]
            is_last = position.submission == self.start.submission
            read = _read_piece if self.is_remote else _read_file
            lines, position = read(location, position, end if is_last else None)
            if lines or is_last:
                return lines, position
            position = Position(position.submission + 1)

    def begin_of_last(self, start: Position, end: Position, most: int) -> tuple[Position, int]:
        """Returns the position of the last bytes between two positions, and the number of bytes before it.

        Args:
            start: The first of the two positions, in the last submission.
            end: The second of the two positions.
            most: The number of bytes to keep. Returns ``start`` and 0 if there are no more bytes than these.
        """
        # On an object store the folder is listed if there is more than one piece between the two.
        sizes = store.sizes(self._locations[-1]) if start.piece < end.piece else {}
        parts = []
        for piece in range(start.piece, end.piece + 1):
            first = start.offset if piece == start.piece else 0
            last = end.offset if piece == end.piece else sizes.get(f"{piece:08d}", 0)
            parts.append((piece, first, max(first, last)))
        skipped = before = sum(last - first for _, first, last in parts) - most
        if before <= 0:
            return start, 0
        for piece, first, last in parts:
            if skipped < last - first:
                return replace(start, piece=piece, offset=first + skipped), before
            skipped -= last - first
        return end, before


def _read_file(path: str, position: Position, end: Position | None) -> tuple[list[str], Position]:
    size = READ if end is None else min(READ, end.offset - position.offset)
    if size <= 0:
        return [], position
    try:
        with open(path, "rb") as file:
            file.seek(position.offset)
            data = file.read(size)
            while data and b"\n" not in data and (more := file.read(READ)):
                data += more
    except FileNotFoundError:
        return [], position
    whole = data.rfind(b"\n") + 1
    return _lines(data[:whole]), replace(position, offset=position.offset + whole)


def _read_piece(location: str, position: Position, end: Position | None) -> tuple[list[str], Position]:
    """Returns lines of one piece after ``position``, and the new position."""
    at = position
    while end is None or at < end:
        try:
            # Reads one known byte more, since a range that begins at the end of an object is an error.
            path, offset = _piece_name(location, at.piece), at.offset
            data = store.read_from(path, offset - 1)[1:] if offset else store.read_bytes(path)
        except FileNotFoundError:
            break
        following = replace(at, piece=at.piece + 1, offset=0)
        has_next = end is None or at.piece < end.piece
        if data:
            return _lines(data), following if end and has_next else replace(at, offset=offset + len(data))
        if not has_next:
            break
        at = following
    return [], position


def _lines(data: bytes) -> list[str]:
    return data.decode("utf-8", "replace").split("\n")[:-1]


class Appender:
    """Appends lines to a growing file on a disk, whose folder must exist.

    A line that is incomplete, since the disk was full, is ended before the next one.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._torn = False

    def append(self, lines: list[str]) -> None:
        """Appends lines, which readers see immediately. Raises OSError if the disk is full."""
        data = ("\n".join(lines) + "\n").encode("utf-8", "replace") if lines else b""
        if self._file is None:
            self._file = open(self._path, "ab", buffering=0)
        rest = memoryview(b"\n" + data if self._torn else data)
        while rest:
            written = self._file.write(rest)
            self._torn = rest[written - 1] != _NEWLINE if written else self._torn
            rest = rest[written:]

    def close(self) -> None:
        """Closes the file, if it was opened."""
        if self._file:
            self._file.close()


_NEWLINE = ord("\n")

PIECE = 1 << 20
"""Bytes after which the next piece begins. Smaller pieces make more objects, larger ones are uploaded more often."""

WAITING_LIMIT = 64 << 20
"""Most bytes of lines that wait in memory while the object store rejects them."""


class PieceWriter:
    """Appends lines to a growing file on an object store. One thread appends, and another one flushes."""

    def __init__(self, location: str) -> None:
        """Makes a writer; `flush` accesses the store.

        Args:
            location: URL of the folder.
        """
        self._location = location
        self._waiting: list[bytes] = []
        self._piece: int | None = None
        self._content = b""

    @property
    def written(self) -> list[int]:
        """Piece and offset of the end, up to which the file can be read."""
        return [] if self._piece is None else [self._piece, len(self._content)]

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
            # The process that has started the stage of this driver may have written lines about that.
            self._piece = len(store.list_names(self._location))
        piece, content = self._piece, self._content
        if len(content) >= PIECE:
            piece, content = piece + 1, b""
        store.write_bytes(_piece_name(self._location, piece), content + data)
        self._piece, self._content = piece, content + data
        del self._waiting[: len(waiting)]


def _piece_name(location: str, piece: int) -> str:
    return store.join(location, f"{piece:08d}")
