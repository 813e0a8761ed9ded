"""`LineReader` reads the ranks' lines and the events of a run for a follower, from a position on."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol, TypeVar

from rankzero.run import growing, pieces
from rankzero.run.directory import RunDirectory
from rankzero.run.growing import Position
from rankzero.run.names import LINES, log_name
from rankzero.run.status import RunStatus

T = TypeVar("T")

_OF_RANK = re.compile(r"\[(\d+)\] ")


TAIL_PIECES = 8
"""Number of last pieces of the ranks' stream on an object store that `LineReader.tails` reads."""


def split_rank(line: str) -> tuple[int, str] | None:
    """Returns rank and text of a line that begins with its ``[rank]``; None for any other line."""
    found = _OF_RANK.match(line)
    return (int(found[1]), line[found.end() :]) if found else None


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
        self, name: str, position: Position, status: RunStatus | None, end: Position | None = None
    ) -> tuple[list[str], Position]:
        """Returns some lines of a growing file or stream, and the new position; no lines at its end.

        Args:
            name: Path within the run directory.
            position: The position to read from.
            status: On an object store, the status that records the end; None finds the end with two more requests.
            end: On a disk, the position at which to stop; None reads to the end.
        """
        path = self._run.path(name)
        if not self._run.is_remote:
            return self._patiently(functools.partial(growing.read_lines, path, position, end))
        end = None if status is None else Position(*status.written.get(name, ()))
        return self._patiently(functools.partial(pieces.read_lines, path, position, end))

    def of_ranks(
        self,
        positions: dict[int, Position],
        status: RunStatus | None,
        *,
        prefix: bool,
        thorough: bool = True,
        ends: Mapping[int, Position] | None = None,
    ) -> Iterator[str]:
        """Yields every line of some ranks after the given positions, which it updates.

        Args:
            positions: The position to read from, by rank. On an object store, where all ranks share a stream, the
                smallest position counts.
            status: As for `of_file`.
            prefix: Begins each line with ``[rank]``.
            thorough: Opens every file, even if a file server reports that it has not grown.
            ends: On a disk, the position at which to stop, by rank, since a rank may write faster than its lines are
                shown.
        """
        if self._run.is_remote:
            yield from self._of_stream(positions, status, prefix=prefix)
            return
        unread = {rank for rank, position in positions.items() if thorough or self._has_grown(rank, position)}
        while unread:
            for rank in sorted(unread):
                lines, positions[rank] = self.of_file(log_name(rank), positions[rank], None, (ends or {}).get(rank))
                yield from (f"[{rank}] {line}" for line in lines) if prefix else lines
                if not lines:
                    unread.discard(rank)

    def ends(self, ranks: Iterable[int], status: RunStatus) -> dict[int, Position]:
        """Returns the current ends of some ranks' lines; on an object store, the end that the status records."""
        if self._run.is_remote:
            return dict.fromkeys(ranks, Position(*status.written.get(LINES, ())))
        return {rank: growing.end_of(self._run.path(log_name(rank))) for rank in ranks}

    def tails(
        self, starts: dict[int, Position], size: int, status: RunStatus, running: RunStatus | None
    ) -> dict[int, tuple[list[str], bool]]:
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
            lines = list(self.of_ranks({rank: begin}, None, prefix=False))
            # The first line may be incomplete.
            tails[rank] = (lines[1:], True) if begin > starts[rank] else (lines, False)
        return tails

    def _tails_of_stream(
        self, starts: dict[int, Position], size: int, status: RunStatus, running: RunStatus | None
    ) -> dict[int, tuple[list[str], bool]]:
        end = Position(*status.written.get(LINES, ()))
        begins = {rank: max(start, Position(max(0, end.piece - TAIL_PIECES))) for rank, start in starts.items()}
        kept: dict[int, list[str]] = {rank: [] for rank in starts}
        for line in self.of_ranks(dict(begins), running, prefix=True):
            if (found := split_rank(line)) and found[0] in kept:
                kept[found[0]].append(found[1])
        tails = {}
        for rank, lines in kept.items():
            left, first = size, len(lines)
            while first and (left := left - len(lines[first - 1])) >= 0:
                first -= 1
            tails[rank] = (lines[first:], first > 0 or begins[rank] > starts[rank])
        return tails

    def _has_grown(self, rank: int, position: Position) -> bool:
        return self._patiently(functools.partial(growing.has_grown, self._run.path(log_name(rank)), position))

    def _of_stream(self, positions: dict[int, Position], status: RunStatus | None, *, prefix: bool) -> Iterator[str]:
        while positions:
            lines, position = self.of_file(LINES, min(positions.values()), status)
            positions.update(dict.fromkeys(positions, position))
            for line in lines:
                found = split_rank(line)
                if found is None or found[0] in positions:
                    yield line if prefix or not found else found[1]
            if not lines:
                break
