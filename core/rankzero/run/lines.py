"""What ranks wrote, and events, as a follower reads them: from a position on, as far as they were written."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol, TypeVar

from rankzero.run import growing, pieces
from rankzero.run.directory import LINES, RunDirectory, RunStatus, log_name
from rankzero.run.growing import Position

T = TypeVar("T")

_OF_RANK = re.compile(r"\[(\d+)\] ")


TAIL_PIECES = 8
"""Pieces of the lines of all ranks on an object store that `LineReader.tails` reads."""


def split_rank(line: str) -> tuple[int, str] | None:
    """Rank and text of a line that begins with its ``[rank]``; None for another line."""
    found = _OF_RANK.match(line)
    return (int(found[1]), line[found.end() :]) if found else None


class Patience(Protocol):
    """Calls what it is given, again while the store fails for a moment."""

    def __call__(self, read: Callable[[], T]) -> T:
        """What ``read`` returns."""


class LineReader:
    """Reads the lines of a run directory.

    Args:
        run: The run.
        patiently: How the store is read.
    """

    def __init__(self, run: RunDirectory, patiently: Patience) -> None:
        self._run = run
        self._patiently = patiently

    def of_file(
        self, name: str, position: Position, status: RunStatus | None, end: Position | None = None
    ) -> tuple[list[str], Position]:
        """Some lines of what grows under a name, and the new position; no lines at its end.

        Args:
            name: Within the run directory.
            position: Where to begin.
            status: On an object store, how far is read; None reads what is there, at the cost of two more requests.
            end: On a disk, how far is read; None reads what is there.
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
        """Every line after the positions, which move on, of these ranks; with its ``[rank]`` if asked to.

        Args:
            positions: By rank. On an object store all ranks share a stream, and the first position counts.
            status: As for `of_file`.
            prefix: Lines begin with ``[rank]``.
            thorough: Open every file, whatever a file server says of its size.
            ends: By rank, how far a file on a disk is read: its rank may write faster than the lines are shown.
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
        """Where the lines of these ranks end now; on an object store, as far as the status tells."""
        if self._run.is_remote:
            return dict.fromkeys(ranks, Position(*status.written.get(LINES, ())))
        return {rank: growing.end_of(self._run.path(log_name(rank))) for rank in ranks}

    def tails(
        self, starts: dict[int, Position], size: int, status: RunStatus, running: RunStatus | None
    ) -> dict[int, tuple[list[str], bool]]:
        """The last lines of these ranks, about ``size`` bytes of each, and whether others come before.

        Args:
            starts: By rank: where its lines begin.
            size: On an object store these are looked for in the last `TAIL_PIECES` pieces.
            status: The run's.
            running: The same, or None for a run that has ended, as for `of_ranks`.
        """
        if self._run.is_remote:
            return self._tails_of_stream(starts, size, status, running)
        tails = {}
        for rank, end in self.ends(starts, status).items():
            begin = max(starts[rank], Position(0, end.offset - size))
            lines = list(self.of_ranks({rank: begin}, None, prefix=False))
            # The first line may be the rest of one.
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
