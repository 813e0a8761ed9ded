"""`Output` reads the ranks' lines and the events of a run for a follower, from given positions on."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol, TypeVar

from rankzero import store
from rankzero.run.directory import Submission
from rankzero.run.growing import Position, Stream
from rankzero.run.names import EVENTS, LINES
from rankzero.run.status import RunStatus

T = TypeVar("T")

_OF_RANK = re.compile(r"\[(\d+)\] ")

_OWN = re.compile(r"(?:\[\d+\] )?rankzero: ")

_LEVEL = re.compile(r"\[\d+\] (?:[\d:.,TZ/+-]+\s+){0,2}\W?(WARN(?:ING)?|ERROR|CRITICAL|FATAL)\b")
"""A level at the beginning of a rank's line, also after a date and a time."""

_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z\t")

TAIL = 8 << 20
"""Bytes of the last lines of all ranks that `Output.tails` reads."""


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


def _parsed(stored: Iterable[str]) -> Iterator[Line]:
    """Yields stored lines, each of which begins with its ``[rank]``, except notes about lines of all ranks."""
    stamp = ""
    for line in stored:
        rank = None
        if found := _OF_RANK.match(line):
            rank, line = int(found[1]), line[found.end() :]
        if found := _STAMP.match(line):
            stamp, line = found[0][:-1], line[found.end() :]
        yield Line(stamp, rank, line)


class Patience(Protocol):
    """A function that calls another one, and repeats the call for some time while the store fails."""

    def __call__(self, read: Callable[[], T]) -> T:
        """Returns the result of ``read``."""


class Output:
    """Reads what the ranks and the driver of a training have written, for a `RunHandle` and for what follows one."""

    def __init__(self, own: Callable[[], Submission], read: Patience, polls: Callable[[], Iterator[RunStatus]]) -> None:
        """Prepares to read, and reads nothing yet.

        Args:
            own: Returns the handle's submission.
            read: Calls a function that reads the store, as a follower of the run does.
            polls: Returns an iterator with a status for every poll of the run until its end.
        """
        self._own = own
        self._read = read
        self._polls = polls

    def _stream(self, name: str) -> Stream:
        own = self._own()
        return Stream([store.join(place, name) for place in [*own.earlier(), own.directory]])

    def start(self) -> Position:
        """Returns where the lines of this submission begin; ``Position()`` is where those of the training do."""
        return self._stream(LINES).start

    def end(self, status: RunStatus) -> Position:
        """Returns the current end of the lines.

        Args:
            status: A status that was just read, which has the end on an object store.
        """
        stream = self._stream(LINES)
        return self._read(lambda: stream.end(status.written.get(LINES, ())))

    def begin_of_last(self, start: Position, end: Position, most: int) -> tuple[Position, int]:
        """Returns the position of the last ``most`` bytes between two positions, and the number of bytes before it."""
        stream = self._stream(LINES)
        return self._read(lambda: stream.begin_of_last(start, end, most))

    def lines(
        self,
        position: Position,
        follow: bool = False,
        *,
        ranks: Collection[int] | None = None,
        status: RunStatus | None = None,
        end: Position | None = None,
        reached: Callable[[Position], object] = lambda _: None,
    ) -> Iterator[Line]:
        """Yields the lines of some ranks from a position on. `logs` is built on this method.

        Args:
            position: The position to read from.
            follow: Continues until the run ends.
            ranks: The ranks; None for all. Notes about lines of all ranks are always yielded.
            status: Without ``follow``: a status that was just read, which saves requests to an object store.
            end: Without ``follow``: the position at which to stop.
            reached: Called with the new position once all lines of one access to the store have been yielded. After an
                error, the lines that were yielded since then are read again.
        """
        stream = self._stream(LINES)
        for found in self._polls() if follow else [status]:
            while True:
                until = end or _end_of(stream, LINES, found)
                stored, after = self._read(functools.partial(stream.read, position, until))
                for line in _parsed(stored):
                    if ranks is None or line.rank is None or line.rank in ranks:
                        yield line
                position = after
                reached(position)
                if not stored:
                    break

    def read_events(self, position: Position, status: RunStatus | None = None) -> tuple[list[dict[str, Any]], Position]:
        """Returns some events from a position on, and the new position, which is unchanged if there are no more events.

        Args:
            position: The position to read from; ``Position()`` is the beginning of the training.
            status: A status that was just read, which saves requests to an object store.
        """
        stream = self._stream(EVENTS)
        until = _end_of(stream, EVENTS, status)
        lines, after = self._read(functools.partial(stream.read, position, until))
        events = []
        for line in lines:
            # A line that was cut by a full disk is not JSON.
            with contextlib.suppress(ValueError):
                events.append(json.loads(line))
        return events, after

    def tails(self, ranks: Iterable[int], size: int, status: RunStatus) -> dict[int, tuple[list[Line], bool]]:
        """Returns the last lines of some ranks in the handle's submission, of the last `TAIL` bytes of all ranks.

        Args:
            ranks: The ranks.
            size: Approximate number of bytes for each rank.
            status: A status that was just read.

        Returns:
            The lines, and whether there are earlier ones, by rank.
        """
        start = self.start()
        begin, skipped = self.begin_of_last(start, self.end(status), TAIL)
        kept: dict[int, list[Line]] = {rank: [] for rank in ranks}
        for line in self.lines(begin, status=status):
            if line.rank in kept:
                kept[line.rank].append(line)
        tails = {}
        for rank, lines in kept.items():
            left, first = size, len(lines)
            while first and (left := left - len(lines[first - 1].text)) >= 0:
                first -= 1
            tails[rank] = (lines[first:], first > 0 or skipped > 0)
        return tails


def _end_of(stream: Stream, name: str, status: RunStatus | None) -> Position | None:
    """Returns the end of a stream according to the status of a running run.

    A driver that died may have written more than it recorded, and a file server may report an old size.
    """
    return None if status is None or status.final or not stream.is_remote else stream.end(status.written.get(name, ()))
