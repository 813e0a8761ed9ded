"""`Output` reads the ranks' lines and the events of a run for a follower, from given positions on."""

from __future__ import annotations

import contextlib
import functools
import heapq
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol, TypeVar

from rankzero import bounds
from rankzero.job import Job
from rankzero.run import growing
from rankzero.run.directory import RunDirectory
from rankzero.run.growing import Position
from rankzero.run.names import EVENTS, LINES, log_name
from rankzero.run.observer import Observer
from rankzero.run.status import RunStatus

THOROUGH_INTERVAL = bounds.scaled(2.0)  # Between two reads of every log: a file server may report their sizes late

T = TypeVar("T")

_OF_RANK = re.compile(r"\[(\d+)\] ")

_OWN = re.compile(r"(?:\[\d+\] )?rankzero: ")

_LEVEL = re.compile(r"\[\d+\] (?:[\d:.,TZ/+-]+\s+){0,2}\W?(WARN(?:ING)?|ERROR|CRITICAL|FATAL)\b")
"""A level at the beginning of a rank's line, also after a date and a time."""

_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z\t")

TAIL_PIECES = 8
"""Number of last pieces of the ranks' stream on an object store that `Output.tails` reads."""


def level_of(line: str) -> int:
    """Returns the logging level that a line with its ``[rank]`` prefix begins with; INFO for none and for DEBUG."""
    found = _LEVEL.match(line)
    return logging.getLevelNamesMapping()[found[1]] if found else logging.INFO


def is_own(line: str) -> bool:
    """Returns True for a line of rankzero itself, with or without a ``[rank]`` prefix; no verbosity hides it."""
    return _OWN.match(line) is not None


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


class Output:
    """Reads what the ranks and the driver of a run have written, for a `RunHandle` and for what follows one."""

    def __init__(
        self,
        run: RunDirectory,
        observer: Observer,
        job: Job | None,
        read: Patience,
        polls: Callable[[], Iterator[RunStatus]],
    ) -> None:
        """Prepares to read, and reads nothing yet.

        Args:
            run: The run directory.
            observer: Reads the store patiently.
            job: Job of the handle's submission; None for the last one.
            read: Calls a function that reads the store, as a follower of the run does.
            polls: Returns an iterator with a status for every poll of the run until its end.
        """
        self._run = run
        self._observer = observer
        self._job = job
        self._read = read
        self._polls = polls

    def ends(self, ranks: Iterable[int] | None = None, status: RunStatus | None = None) -> dict[int, Position]:
        """Returns the current ends of ranks' lines. `lines` from there on yields the lines that are written later.

        Args:
            ranks: The ranks; None for all.
            status: A status that was just read, which saves a request to an object store.
        """
        ranks = range(self._observer.patiently(self._run.job).num_processes) if ranks is None else ranks
        if self._run.is_remote:
            status = status or self._observer.patiently(self._run.status)
            return dict.fromkeys(ranks, Position(*status.written.get(LINES, ())))
        return {rank: growing.end_of(self._run.path(log_name(rank))) for rank in ranks}

    def starts(self) -> dict[int, Position]:
        """Returns the positions at which the lines of the last submission begin, by rank."""
        job = self._job or self._observer.patiently(self._run.job)
        return {rank: Position(*job.log_starts.get(str(rank), ())) for rank in range(job.num_processes)}

    def begin_of_last(self, start: Position, end: Position, most: int) -> tuple[Position, int]:
        """Returns the position of the last ``most`` bytes between two positions, and the number of bytes before it."""
        location = self._run.path(LINES)
        return self._read(lambda: growing.begin_of_last(location, start, end, most))

    def lines(
        self,
        positions: dict[int, Position],
        follow: bool,
        *,
        prefix: bool,
        status: RunStatus | None = None,
        ends: Mapping[int, Position] | None = None,
    ) -> Iterator[str]:
        """Yields the lines of some ranks from given positions on. `logs` is built on this method.

        Args:
            positions: The position to read from, by rank. Updated as lines are read.
            follow: Continues until the run ends.
            prefix: Begins each line with ``[rank]``.
            status: Without ``follow``: a status that was just read, which saves requests to an object store.
            ends: Without ``follow``, on a disk: the position at which to stop, by rank.
        """
        for line in self.timed_lines(positions, follow, status=status, ends=ends):
            yield line.prefixed if prefix else line.text

    def timed_lines(
        self,
        positions: dict[int, Position],
        follow: bool,
        *,
        status: RunStatus | None = None,
        ends: Mapping[int, Position] | None = None,
    ) -> Iterator[Line]:
        """Yields lines as `lines` does, each with its rank and its time."""
        if not follow:
            yield from self._of_ranks(positions, _running(status), ends=ends)
            return
        thorough_at = 0.0
        for found in self._polls():
            thorough = found.final or time.monotonic() >= thorough_at
            if thorough:
                thorough_at = time.monotonic() + THOROUGH_INTERVAL()
            yield from self._of_ranks(positions, _running(found), thorough=thorough)

    def read_events(self, position: Position, status: RunStatus | None = None) -> tuple[list[dict[str, Any]], Position]:
        """Returns some events from a position on, and the new position, which is unchanged if there are no more events.

        Args:
            position: The position to read from; ``Position()`` is the beginning.
            status: A status that was just read, which saves requests to an object store.
        """
        lines, position = self._of_file(EVENTS, position, _running(status))
        events = []
        for line in lines:
            # A line that was cut by a full disk is not JSON.
            with contextlib.suppress(ValueError):
                events.append(json.loads(line))
        return events, position

    def tails(self, ranks: Iterable[int], size: int) -> dict[int, tuple[list[Line], bool]]:
        """Returns the last lines of some ranks in the last submission.

        Args:
            ranks: The ranks.
            size: Approximate number of bytes for each rank. On an object store, where all ranks share one stream, only
                its last `TAIL_PIECES` pieces are read.

        Returns:
            The lines, and whether there are earlier ones, by rank.
        """
        known = self.starts()
        starts = {rank: known[rank] for rank in ranks}
        if self._run.is_remote:
            return self._tails_of_stream(starts, size, self._observer.patiently(self._run.status))
        tails = {}
        for rank, end in self.ends(starts).items():
            begin = max(starts[rank], Position(0, end.offset - size))
            lines = list(self._of_ranks({rank: begin}, None))
            # The first line may be incomplete.
            tails[rank] = (lines[1:], True) if begin > starts[rank] else (lines, False)
        return tails

    def _tails_of_stream(
        self, starts: dict[int, Position], size: int, status: RunStatus
    ) -> dict[int, tuple[list[Line], bool]]:
        end = Position(*status.written.get(LINES, ()))
        begins = {rank: max(start, Position(max(0, end.piece - TAIL_PIECES))) for rank, start in starts.items()}
        kept: dict[int, list[Line]] = {rank: [] for rank in starts}
        for line in self._of_ranks(dict(begins), _running(status)):
            if line.rank in kept:
                kept[line.rank].append(line)
        tails = {}
        for rank, lines in kept.items():
            left, first = size, len(lines)
            while first and (left := left - len(lines[first - 1].text)) >= 0:
                first -= 1
            tails[rank] = (lines[first:], first > 0 or begins[rank] > starts[rank])
        return tails

    def _of_ranks(
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
            status: As for `_of_file`.
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
                lines, position = self._of_file(log_name(rank), positions[rank], None, end, most)
                yield from lines
                positions[rank] = position

        return _parsed(stored(), rank)

    def _has_grown(self, rank: int, position: Position) -> bool:
        return self._read(functools.partial(growing.has_grown, self._run.path(log_name(rank)), position))

    def _of_stream(self, positions: dict[int, Position], status: RunStatus | None) -> Iterator[Line]:
        while positions:
            stored, position = self._of_file(LINES, min(positions.values()), status)
            yield from (line for line in _parsed(stored) if line.rank is None or line.rank in positions)
            positions.update(dict.fromkeys(positions, position))
            if not stored:
                break

    def _of_file(
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
            return self._read(functools.partial(growing.read_lines, path, position, end, most))
        end = None if status is None else Position(*status.written.get(name, ()))
        return self._read(functools.partial(growing.read_piece, path, position, end))


def _running(status: RunStatus | None) -> RunStatus | None:
    """Returns the status of a running run, else None: a driver that died may have written more than it recorded."""
    return None if status is None or status.final else status
