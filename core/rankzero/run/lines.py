"""The lines and events of a run: the growing files that hold them, the form of a stored line, and its printing.

On a disk a growing file is one file. An object store cannot append: there it is a folder of pieces, the last of which
is rewritten while it is small. ``status.json`` records the end, so that readers request no piece that does not exist.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import IO, Any, NamedTuple, TypeVar

from rankzero import store
from rankzero.run.status import RunStatus

logger = logging.getLogger(__name__)

T = TypeVar("T")

READ = 4 << 20  # Bytes of lines that a reader reads in one access
PIECE = 1 << 20  # Bytes after which the next piece begins: smaller ones make more objects, larger ones more uploads


class Position(NamedTuple):
    """A position in a stream: which of its submissions, which piece of the growing file, and its offset in bytes."""

    submission: int = 0
    piece: int = 0
    offset: int = 0


class Stream:
    """Reads the growing files of one name in the folders of submissions, the last of which alone may still grow.

    `read` continues from its ``position``.
    """

    def __init__(self, places: Sequence[str], name: str, call: Callable[[Callable[[], Any]], Any]) -> None:
        """Prepares to read from the beginning, by functions that ``call`` calls, and reads nothing yet."""
        self._name = name
        self._locations = [store.join(place, name) for place in places]
        self._read = _read_piece if store.is_url(places[-1]) else _read_file
        self._call = call
        self._is_torn = False
        self.position = Position()

    def end(self, status: RunStatus) -> Position:
        """Returns the current end, which a status that was just read has for an object store."""
        last = len(self._locations) - 1
        if self._read is _read_piece:
            return Position(last, *status.written.get(self._name, ()))
        return Position(last, offset=self._call(functools.partial(_size, self._locations[-1])))

    def read(self, end: Position | None = None) -> list[str]:
        """Returns some complete lines, and moves the position behind them; no lines at the end.

        An end at which to stop saves requests to an object store.
        """
        while True:
            at = self.position
            is_last = at.submission == len(self._locations) - 1
            location, until = self._locations[at.submission], end if is_last else None
            lines: list[str]
            lines, self.position = self._call(functools.partial(self._read, location, at, until))
            if lines or is_last:
                break
            self.position = Position(at.submission + 1)
        if self._is_torn and lines:
            self._is_torn = False
            return lines[1:] or self.read(end)
        return lines

    def new(self, status: RunStatus | None = None) -> Iterator[str]:
        """Yields the lines up to the end that a status shows, and moves the position.

        Without a status it yields all. So does it with a final one: a driver that died may have written more.
        """
        end = None if status is None or status.final else self.end(status)
        while lines := self.read(end):
            yield from lines

    def skip(self, end: Position, most: int) -> bool:
        """Moves the position to about the last ``most`` bytes before an end; False if no more are left anyway.

        The line within which they begin is left out. Of an object store, the sizes of pieces that are left are read.
        """
        piece, offset = end.piece, end.offset - most
        while offset < 0 < piece and Position(end.submission, piece) > self.position:
            piece -= 1
            offset += self._call(functools.partial(_size, _piece_name(self._locations[-1], piece)))
        target = Position(end.submission, piece, max(0, offset))
        if target <= self.position:
            return False
        self.position, self._is_torn = target, target.offset > 0
        return True


def _size(path: str) -> int:
    with contextlib.suppress(FileNotFoundError):
        return store.size(path)
    return 0


def _read_file(path: str, at: Position, end: Position | None) -> tuple[list[str], Position]:
    size = READ if end is None else min(READ, end.offset - at.offset)
    if size <= 0:
        return [], at
    try:
        with open(path, "rb") as file:
            file.seek(at.offset)
            data = file.read(size)
            while data and b"\n" not in data and (more := file.read(READ)):
                data += more
    except FileNotFoundError:
        return [], at
    whole = data.rfind(b"\n") + 1
    return _lines(data[:whole]), at._replace(offset=at.offset + whole)


def _read_piece(location: str, start: Position, end: Position | None) -> tuple[list[str], Position]:
    at = start
    while end is None or at < end:
        try:
            # Reads one known byte more, since a range that begins at the end of an object is an error.
            path, offset = _piece_name(location, at.piece), at.offset
            data = store.read_from(path, offset - 1)[1:] if offset else store.read_bytes(path)
        except FileNotFoundError:
            break
        if data:
            return _lines(data), at._replace(offset=offset + len(data))
        # The piece has no more lines, and is only complete if there is a next one.
        at = at._replace(piece=at.piece + 1, offset=0)
    return [], start


def _lines(data: bytes) -> list[str]:
    return data.decode("utf-8", "replace").split("\n")[:-1]


class Appender:
    """Appends lines to a growing file on a disk, and ends one that is incomplete, since the disk was full, before."""

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
            self._torn = rest[written - 1] != ord("\n") if written else self._torn
            rest = rest[written:]

    def close(self) -> None:
        """Closes the file, if it was opened."""
        if self._file:
            self._file.close()


WAITING_LIMIT = 64 << 20  # Most bytes of lines that wait in memory while the object store rejects them


class PieceWriter:
    """Appends lines to a growing file on an object store. One thread appends, and another one flushes."""

    def __init__(self, location: str) -> None:
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


# -- the form of a stored line ---------------------------------------------------------------------

_OF_RANK = re.compile(r"\[(\d+)\] ")

_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z\t")


class Line(NamedTuple):
    """A line that a rank has written."""

    stamp: str  # When the driver received it or the line before it, in UTC, as ISO 8601 with milliseconds; or empty
    rank: int | None  # None for a note about lines of all ranks
    text: str

    @property
    def prefixed(self) -> str:
        """The text after its ``[rank]``."""
        return self.text if self.rank is None else f"[{self.rank}] {self.text}"

    @property
    def time(self) -> float | None:
        """The Unix time of the stamp; None if it is empty, or the line only begins like one."""
        try:
            return datetime.fromisoformat(self.stamp).timestamp() if self.stamp else None
        except ValueError:
            return None


def stamped(lines: Iterable[str], when: float) -> list[str]:
    """Returns lines as they are stored: each after the time at which the driver received it, and a tab."""
    stamp = datetime.fromtimestamp(when, UTC).replace(tzinfo=None).isoformat(timespec="milliseconds")
    return [f"{stamp}Z\t{line}" for line in lines]


def parsed(stored: Iterable[str], ranks: Collection[int] | None = None) -> Iterator[Line]:
    """Yields the stored lines of some ranks, or of all, and notes about all ranks, which begin with no ``[rank]``."""
    stamp = ""
    for line in stored:
        rank = None
        if found := _OF_RANK.match(line):
            rank, line = int(found[1]), line[found.end() :]
        if found := _STAMP.match(line):
            stamp, line = found[0][:-1], line[found.end() :]
        if ranks is None or rank is None or rank in ranks:
            yield Line(stamp, rank, line)


def tails(lines: Iterable[Line], ranks: Iterable[int], room: int) -> dict[int, tuple[list[Line], bool]]:
    """Returns the last ``room`` characters of the lines of each of some ranks, and whether some were left out."""
    kept: dict[int, deque[Line]] = {rank: deque() for rank in ranks}
    left, cut = dict.fromkeys(kept, room), set[int]()
    for line in lines:
        if line.rank in kept:
            kept[line.rank].append(line)
            left[line.rank] -= len(line.text)
            while left[line.rank] < 0:
                left[line.rank] += len(kept[line.rank].popleft().text)
                cut.add(line.rank)
    return {rank: (list(found), rank in cut) for rank, found in kept.items()}


def events_of(stored: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yields events from the lines that hold them."""
    for line in stored:
        # A line that was cut by a full disk is not JSON.
        with contextlib.suppress(ValueError):
            yield json.loads(line)


# -- printing --------------------------------------------------------------------------------------

_ranks = logging.getLogger("rankzero.ranks")
"""The logger that gets the lines of ranks. Its level, filters and handlers decide what is printed."""


class _Printer(logging.Handler):
    """Writes the lines of ranks to standard output."""

    _failed: object = None
    """The stream that could not be written, so that this is logged once."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the line of a record."""
        self.write(self.format(record))

    def write(self, line: str) -> None:
        """Writes a line to standard output as it is."""
        stream = sys.stdout
        if stream is None:
            return
        encoding = getattr(stream, "encoding", None) or "utf-8"
        try:
            stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
            stream.flush()
        except (OSError, ValueError) as error:
            if self._failed is not stream:
                self._failed = stream
                what = "the lines of the ranks cannot be written to standard output (%s); the run continues"
                logger.warning(what, error)


_printer = _Printer()


@functools.cache
def _print_ranks() -> None:
    """Prints the lines of ranks unless there is a handler by now. Who removes all handlers later gets no output."""
    if not _ranks.handlers:
        _ranks.addHandler(_printer)
        _ranks.propagate = False
    if not _ranks.level:
        _ranks.setLevel(logging.INFO)


def print_line(line: str, run_id: str = "") -> None:
    """Passes a line of a rank to the logger ``rankzero.ranks``, which writes it to standard output unless changed.

    A process without standard output prints none, and a stream that fails (a full disk, a closed pipe) does not end the
    run, whose directory has the lines, too.

    Args:
        line: The line, with its ``[rank]`` prefix; its level is INFO.
        run_id: Name of the run; the log record has it as its attribute ``run_id``.
    """
    if not _ranks.level:
        # `logging.config` resets the loggers below each one that it names.
        _print_ranks.cache_clear()
    _print_ranks()
    is_changed = _ranks.propagate or _ranks.filters or _printer.filters or _printer.level or _printer.formatter
    if _ranks.handlers == [_printer] and _ranks.level == logging.INFO and not is_changed:
        # A record costs more than the line.
        _printer.write(line)
        return
    # `logging.config` disables the loggers that it does not know.
    _ranks.disabled = False
    _ranks.info(line, extra={"run_id": run_id})


def in_notebook() -> bool:
    """Returns True in the kernel of a notebook."""
    shell = sys.modules.get("IPython")
    found = shell.get_ipython() if shell is not None and hasattr(shell, "get_ipython") else None
    return getattr(found, "kernel", None) is not None
