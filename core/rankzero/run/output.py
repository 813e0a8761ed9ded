"""Lines of the ranks and events of a run, as the growing files of a submission hold them."""

from __future__ import annotations

import contextlib
import json
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

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
