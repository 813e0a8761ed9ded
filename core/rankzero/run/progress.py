"""`Progress`: how far the ranks of a run are, how fast, and how long it still takes, from its events as they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rankzero.run.directory import RunStatus
from rankzero.run.growing import Position
from rankzero.run.reports import PROGRESS, OfTraining, RowKeeper, is_number, throughput

RATE_ROWS = 32
"""Last reports of a rank by which its rate is measured."""

REPORTS = "reports"
"""What is counted where no report counts anything."""

COUNTED = frozenset({"report", "time", *PROGRESS, *(f"total_{many}" for many in PROGRESS.values())})
"""Names in a row of reports that are no results."""


class Followed(Protocol):
    """What is asked of a `rankzero.RunHandle` here."""

    id: str
    directory: str

    @property
    def fresh_since(self) -> int:
        """The first attempt of this training."""

    @property
    def pace(self) -> float:
        """Seconds between two looks."""

    def status(self) -> RunStatus:
        """The run's state now."""

    def read_events(self, position: Position, status: RunStatus | None = None) -> tuple[list[dict[str, Any]], Position]:
        """Some events from a position on, and the new position."""


@dataclass(frozen=True)
class RankProgress:
    """How far one rank is.

    Attributes:
        done: How many of `Progress.unit`.
        rate: So many a second; None before two reports have told it.
    """

    done: float
    rate: float | None


class Progress:
    """Reads a run's events, each once, and knows what they add up to.

    Args:
        handle: The run.
    """

    def __init__(self, handle: Followed) -> None:
        self._handle = handle
        self._position = Position()
        self._is_ours: OfTraining | None = None
        self._rows: dict[int, deque[dict[str, Any]]] = {}
        self._keeper = RowKeeper()
        self.total: float | None = None
        """How many there are in all: what ranks report as ``total_steps``, ``total_epochs`` and the like."""

    def read(self, status: RunStatus) -> None:
        """Reads what is new.

        Args:
            status: The run's, just read.

        Raises:
            OSError: the store cannot be read.
        """
        if self._is_ours is None:
            self._is_ours = OfTraining(self._handle.fresh_since)
        while True:
            before = self._position
            events, self._position = self._handle.read_events(before, None if status.final else status)
            for event in events:
                if not self._is_ours(event):
                    continue
                if event.get("type") == "metric":
                    self._add(event)
                elif event.get("type") == "state" and event.get("state") == "starting":
                    # Each rank of the next attempt counts anew, and there may be fewer.
                    self._rows, self.total = {}, None
            if self._position == before:
                return

    def _add(self, event: Mapping[str, Any]) -> None:
        rank, metrics = event.get("rank"), event.get("metrics")
        if not isinstance(rank, int) or not isinstance(metrics, dict) or not is_number(event.get("time")):
            return
        rows = self._rows.setdefault(rank, deque(maxlen=RATE_ROWS))
        count = rows[-1][REPORTS] + 1 if rows else 1
        # What a rank counts in other reports only, it has not lost in this one.
        counted = {name: rows[-1][name] for name in PROGRESS if rows and name in rows[-1]}
        counted |= {name: metrics[name] for name in PROGRESS if is_number(metrics.get(name))}
        rows.append({**counted, "time": event["time"], REPORTS: count})
        if rank == 0:
            self._keeper.add(event)
        for name in (f"total_{many}" for many in PROGRESS.values()):
            if is_number(metrics.get(name)) and name.removeprefix("total_") == self.unit:
                self.total = metrics[name]

    @property
    def _counts(self) -> str:
        rows = self._rows.get(0) or next(iter(self._rows.values()), None)
        return next((name for name in PROGRESS if rows and name in rows[-1]), REPORTS)

    @property
    def unit(self) -> str:
        """What is counted: ``"steps"``, ``"samples"``, ``"tokens"``, ``"epochs"``, else ``"reports"``."""
        return PROGRESS.get(self._counts, REPORTS)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The reports of rank 0, as `rankzero.run.reports.rows_of` has them."""
        return self._keeper.rows

    @property
    def last(self) -> dict[str, Any]:
        """The last report of rank 0, without what it counts."""
        row = self.rows[-1] if self.rows else {}
        return {name: value for name, value in row.items() if name not in COUNTED}

    @property
    def ranks(self) -> dict[int, RankProgress]:
        """The ranks that have reported."""
        name = self._counts
        found = {}
        for rank, rows in sorted(self._rows.items()):
            if name in rows[-1]:
                speed = throughput(rows, {name: self.unit})
                found[rank] = RankProgress(rows[-1][name], next(iter(speed.values()), None))
        return found

    @property
    def slowest(self) -> int | None:
        """The rank that is least far, of equal ones the lowest; None before any has reported."""
        ranks = self.ranks
        return min(ranks, key=lambda rank: (ranks[rank].done, rank), default=None)

    @property
    def seconds_left(self) -> float | None:
        """Until the slowest rank is through; None where no report names a total, or too few have come."""
        if self.slowest is None or self.total is None:
            return None
        found = self.ranks[self.slowest]
        return max(0.0, self.total - found.done) / found.rate if found.rate else None
