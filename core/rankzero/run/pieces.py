"""What grows on an object store, which cannot append: pieces, of which the last is written again while it is small.

All ranks write into one stream, so that the requests of a run do not depend on how many they are: a line begins with
its ``[rank]``, as people see it. How far a stream was written stands in ``status.json``, so nobody asks for what is not
there.
"""

from __future__ import annotations

from rankzero import store
from rankzero.run.growing import Position

PIECE = 1 << 20
"""Bytes from which on a piece is not written again. Smaller ones are more objects, larger ones travel more often."""

WAITING_LIMIT = 64 << 20
"""Bytes of lines that may wait for an object store which does not take them."""


class PieceWriter:
    """Appends lines to a stream, behind what earlier submissions wrote. One thread appends, another one flushes."""

    def __init__(self, location: str) -> None:
        """Asks nothing of the store.

        Args:
            location: URL of the stream's folder.
        """
        self._location = location
        self._waiting: list[bytes] = []
        self._piece: int | None = None
        self._content = b""
        self._end = Position()
        self._follows = False

    @property
    def written(self) -> Position:
        """How far the stream can be read."""
        return self._end if self._piece is None else Position(self._piece, len(self._content))

    def note_end(self, end: Position) -> None:
        """What another driver wrote can be read so far, as long as this one has written nothing.

        Its last write may still be under way. An empty piece is made where that may land, and so replaces nothing.
        """
        self._end, self._follows = end, True

    def append(self, lines: list[str]) -> None:
        """Adds lines to what waits for `flush`. Raises OSError when too much waits already."""
        data = ("\n".join(lines) + "\n").encode("utf-8", "replace") if lines else b""
        if sum(map(len, self._waiting)) + len(data) > WAITING_LIMIT:
            raise OSError(f"{self._location} takes no lines, and {WAITING_LIMIT} bytes wait already")
        self._waiting.append(data)

    def flush(self) -> None:
        """Writes what waits, in one request; for one thread alone. What the store refuses waits on."""
        waiting = list(self._waiting)
        data = b"".join(waiting)
        if not data:
            return
        # Where it goes is decided by what was acknowledged alone: after a lost answer the same piece is written again.
        if self._piece is None:
            piece = end_of(self._location).piece
            if self._follows:
                store.create(_name(self._location, piece), b"")
                piece += 1
            self._piece = piece
        piece, content = self._piece, self._content
        if len(content) >= PIECE:
            piece, content = piece + 1, b""
        store.write_bytes(_name(self._location, piece), content + data)
        self._piece, self._content = piece, content + data
        del self._waiting[: len(waiting)]


def read_lines(location: str, position: Position, end: Position | None) -> tuple[list[str], Position]:
    """Lines of one piece after ``position``, and the new position.

    Args:
        location: URL of the stream's folder.
        position: How far it was read.
        end: How far it was written, by the status, so that nothing is asked for in vain; None asks the store.
    """
    piece, offset = position.piece, position.offset
    while end is None or Position(piece, offset) < end:
        try:
            data = _read_from(_name(location, piece), offset)
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


def end_of(location: str) -> Position:
    """Where a stream ends that nobody writes any more."""
    return Position(len(store.list_names(location)), 0)


def begin_of_last(location: str, start: Position, end: Position, most: int) -> tuple[Position, int]:
    """Returns where the last bytes between two positions begin, and how many bytes come before those.

    Args:
        location: URL of the stream's folder, which is listed if there is more than one piece between the two.
        start: The position from which lines have not been read.
        end: How far they were written.
        most: The number of bytes to keep. ``start`` and 0 are returned if there are no more.
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
    # One byte that is known already: a range that begins at the end of an object is an error.
    return store.read_from(location, offset - 1)[1:] if offset else store.read_bytes(location)


def _name(location: str, piece: int) -> str:
    return store.join(location, f"{piece:08d}")
