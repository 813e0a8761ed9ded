"""`LineReader` reads the ranks' lines and the events of a run for a follower, from a position on."""

from __future__ import annotations

import functools
import heapq
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import NamedTuple, Protocol, TypeVar

from rankzero.run import growing, pieces
from rankzero.run.directory import RunDirectory
from rankzero.run.growing import Position
from rankzero.run.names import LINES, log_name
from rankzero.run.status import RunStatus

T = TypeVar("T")

_OF_RANK = re.compile(r"\[(\d+)\] ")

_LEVEL = re.compile(r"\[\d+\] (?:[\d:.,TZ/+-]+\s+){0,2}\W?(WARN(?:ING)?|ERROR|CRITICAL|FATAL)\b")
"""A level at the beginning of a rank's line, also after a date and a time."""

_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z\t")

TAIL_PIECES = 8
"""Number of last pieces of the ranks' stream on an object store that `LineReader.tails` reads."""


def level_of(line: str) -> int:
    """Returns the logging level that a line with its ``[rank]`` prefix begins with; INFO for none and for DEBUG."""
    found = _LEVEL.match(line)
    return logging.getLevelNamesMapping()[found[1]] if found else logging.INFO


class Line(NamedTuple):
    """A line that a rank has written.

    Attributes:
        stamp: The time at which the driver received the line, in UTC, as ISO 8601 with milliseconds. Of a line that is
            stored without a time, that of the line before it; empty if there is none.
        rank: The rank; None for a note about lines of all ranks.
        text: The line.
    """

    stamp: str
    rank: int | None
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


def _parsed(stored: Iterable[str], rank: int | None = None) -> Iterator[Line]:
    """Yields stored lines of one rank, or of a stream in which each begins with its ``[rank]``."""
    stamp = ""
    is_stream = rank is None
    for line in stored:
        if is_stream and (found := _OF_RANK.match(line)):
            rank, line = int(found[1]), line[found.end() :]
        elif is_stream:
            rank = None
        if found := _STAMP.match(line):
            stamp, line = found[0][:-1], line[found.end() :]
        yield Line(stamp, rank, line)


class Patience(Protocol):
    """A function that calls another one, and repeats the call for some time while the store fails."""

    def __call__(self, read: Callable[[], T]) -> T:
        """Returns the result of ``read``."""


class LineReader:
    """Reads the lines of a run directory.

    Args:
        run: The run directory.
        patiently: Reads the store, with retries.
    """

    def __init__(self, run: RunDirectory, patiently: Patience) -> None:
        self._run = run
        self._patiently = patiently

    def of_file(
        self,
        name: str,
        position: Position,
        status: RunStatus | None,
        end: Position | None = None,
        most: int = growing.READ,
    ) -> tuple[list[str], Position]:
        """Returns some lines of a growing file or stream, and the new position; no lines at its end.

        Args:
            name: Path within the run directory.
            position: The position to read from.
            status: On an object store, the status that records the end; None finds the end with two more requests.
            end: On a disk, the position at which to stop; None reads to the end.
            most: On a disk, the number of bytes to read.
        """
        path = self._run.path(name)
        if not self._run.is_remote:
            return self._patiently(functools.partial(growing.read_lines, path, position, end, most))
        end = None if status is None else Position(*status.written.get(name, ()))
        return self._patiently(functools.partial(pieces.read_lines, path, position, end))

    def of_ranks(
        self,
        positions: dict[int, Position],
        status: RunStatus | None,
        *,
        thorough: bool = True,
        ends: Mapping[int, Position] | None = None,
    ) -> Iterator[Line]:
        """Yields every line of some ranks after the given positions, in the order of their times.

        A position is updated when all lines that were read with one access have been yielded. After an error, the
        lines that were yielded since then are read again.

        Args:
            positions: The position to read from, by rank. On an object store, where all ranks share a stream, the
                smallest position counts.
            status: As for `of_file`.
            thorough: Opens every file, even if a file server reports that it has not grown.
            ends: On a disk, the position at which to stop, by rank, since a rank may write faster than its lines are
                shown.
        """
        if self._run.is_remote:
            yield from self._of_stream(positions, status)
            return
        unread = [rank for rank, position in sorted(positions.items()) if thorough or self._has_grown(rank, position)]
        # Lines of every rank are in memory at the same time.
        most = max(growing.READ_MIN, growing.READ // max(1, len(unread)))
        yield from heapq.merge(*(self._of_rank(rank, positions, (ends or {}).get(rank), most) for rank in unread))

    def _of_rank(self, rank: int, positions: dict[int, Position], end: Position | None, most: int) -> Iterator[Line]:
        def stored() -> Iterator[str]:
            lines = [""]
            while lines:
                lines, position = self.of_file(log_name(rank), positions[rank], None, end, most)
                yield from lines
                positions[rank] = position

        return _parsed(stored(), rank)

    def ends(self, ranks: Iterable[int], status: RunStatus) -> dict[int, Position]:
        """Returns the current ends of some ranks' lines; on an object store, the end that the status records."""
        if self._run.is_remote:
            return dict.fromkeys(ranks, Position(*status.written.get(LINES, ())))
        return {rank: growing.end_of(self._run.path(log_name(rank))) for rank in ranks}

    def tails(
        self, starts: dict[int, Position], size: int, status: RunStatus, running: RunStatus | None
    ) -> dict[int, tuple[list[Line], bool]]:
        """Returns the last lines of some ranks, and whether there are earlier ones.

        Args:
            starts: The position at which the lines begin, by rank.
            size: Approximate number of bytes for each rank. On an object store, only the last `TAIL_PIECES` pieces are
                read.
            status: Status of the run.
            running: The same status while the run is running, else None, as for `of_ranks`.
        """
        if self._run.is_remote:
            return self._tails_of_stream(starts, size, status, running)
        tails = {}
        for rank, end in self.ends(starts, status).items():
            begin = max(starts[rank], Position(0, end.offset - size))
            lines = list(self.of_ranks({rank: begin}, None))
            # The first line may be incomplete.
            tails[rank] = (lines[1:], True) if begin > starts[rank] else (lines, False)
        return tails

    def _tails_of_stream(
        self, starts: dict[int, Position], size: int, status: RunStatus, running: RunStatus | None
    ) -> dict[int, tuple[list[Line], bool]]:
        end = Position(*status.written.get(LINES, ()))
        begins = {rank: max(start, Position(max(0, end.piece - TAIL_PIECES))) for rank, start in starts.items()}
        kept: dict[int, list[Line]] = {rank: [] for rank in starts}
        for line in self.of_ranks(dict(begins), running):
            if line.rank in kept:
                kept[line.rank].append(line)
        tails = {}
        for rank, lines in kept.items():
            left, first = size, len(lines)
            while first and (left := left - len(lines[first - 1].text)) >= 0:
                first -= 1
            tails[rank] = (lines[first:], first > 0 or begins[rank] > starts[rank])
        return tails

    def _has_grown(self, rank: int, position: Position) -> bool:
        return self._patiently(functools.partial(growing.has_grown, self._run.path(log_name(rank)), position))

    def _of_stream(self, positions: dict[int, Position], status: RunStatus | None) -> Iterator[Line]:
        while positions:
            stored, position = self.of_file(LINES, min(positions.values()), status)
            yield from (line for line in _parsed(stored) if line.rank is None or line.rank in positions)
            positions.update(dict.fromkeys(positions, position))
            if not stored:
                break
