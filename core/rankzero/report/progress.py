"""`Progress`: the progress and rate of each rank of a run, and the time left, from its events as they arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rankzero.run.growing import Position
from rankzero.run.reports import PROGRESS, TOTALS, UNSHOWN, OfTraining, RowKeeper, is_number, throughput
from rankzero.run.status import RunStatus

RATE_ROWS = 32
"""Newest reports of a rank from which its rate is computed."""

REPORTS = "reports"
"""The unit of a run whose reports count nothing."""

COUNTED = frozenset({"report", *UNSHOWN, *PROGRESS, *TOTALS})
"""Names in a row of reports that are counts or times and no results."""


class Followed(Protocol):
    """The part of `rankzero.RunHandle` that `Progress` uses."""

    id: str
    directory: str

    @property
    def fresh_since(self) -> int:
        """The number of the first attempt of this training."""

    @property
    def pace(self) -> float:
        """Seconds between two polls of the run."""

    @property
    def output(self) -> EventReader:
        """The reader of its events."""

    def status(self) -> RunStatus:
        """Returns the current status of the run."""


class EventReader(Protocol):
    """The part of `rankzero.run.output.Output` that `Progress` uses."""

    def read_events(self, position: Position, status: RunStatus | None = None) -> tuple[list[dict[str, Any]], Position]:
        """Returns some events from a position on, and the new position."""


@dataclass(frozen=True)
class RankProgress:
    """The progress of one rank.

    Attributes:
        done: The number of units (`Progress.unit`) that are done.
        rate: Units for each second; None before the second report.
    """

    done: float
    rate: float | None


class Progress:
    """Reads each event of a run once, and sums up the progress of its ranks.

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
        """The units of the whole training, which ranks report as ``total_steps``, ``total_epochs`` and the like."""

    def read(self, status: RunStatus) -> None:
        """Reads the new events.

        Args:
            status: The status of the run, just read.

        Raises:
            OSError: the store cannot be read.
        """
        if self._is_ours is None:
            self._is_ours = OfTraining(self._handle.fresh_since)
        while True:
            before = self._position
            events, self._position = self._handle.output.read_events(before, None if status.final else status)
            for event in filter(self._is_ours, events):
                self.add(event)
            if self._position == before:
                return

    def add(self, event: Mapping[str, Any]) -> None:
        """Takes the next event of the training; `read` calls it with those that it reads."""
        if event.get("type") == "metric":
            self._add(event)
        elif event.get("type") == "state":
            self._keeper.add(event)
            if event.get("state") == "starting":
                # Each rank of the next attempt counts from its own start, and there may be fewer ranks.
                self._rows, self.total = {}, None

    def _add(self, event: Mapping[str, Any]) -> None:
        rank, metrics = event.get("rank"), event.get("metrics")
        if not isinstance(rank, int) or not isinstance(metrics, dict) or not is_number(event.get("time")):
            return
        rows = self._rows.setdefault(rank, deque(maxlen=RATE_ROWS))
        count = rows[-1][REPORTS] + 1 if rows else 1
        # A count that is missing in this report keeps its value of an earlier one.
        counted = {name: rows[-1][name] for name in PROGRESS if rows and name in rows[-1]}
        counted |= {name: metrics[name] for name in PROGRESS if is_number(metrics.get(name))}
        rows.append({**counted, "time": event["time"], REPORTS: count})
        self._keeper.add(event)
        for name in TOTALS:
            if is_number(metrics.get(name)) and name.removeprefix("total_") == self.unit:
                self.total = metrics[name]

    @property
    def _counts(self) -> str:
        rows = self._rows.get(0) or next(iter(self._rows.values()), None)
        return next((name for name in PROGRESS if rows and name in rows[-1]), REPORTS)

    @property
    def unit(self) -> str:
        """The unit of progress: ``"steps"``, ``"samples"``, ``"tokens"``, ``"epochs"`` or else ``"reports"``."""
        return PROGRESS.get(self._counts, REPORTS)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The reports of rank 0, as `rankzero.run.reports.rows_of` returns them."""
        return self._keeper.rows

    @property
    def last(self) -> dict[str, Any]:
        """The last report of rank 0, without its counts."""
        row = self.rows[-1] if self.rows else {}
        return {name: value for name, value in row.items() if name not in COUNTED}

    @property
    def ranks(self) -> dict[int, RankProgress]:
        """The progress of each rank that has reported."""
        name = self._counts
        found = {}
        for rank, rows in sorted(self._rows.items()):
            if name in rows[-1]:
                speed = throughput(rows, {name: self.unit})
                found[rank] = RankProgress(rows[-1][name], next(iter(speed.values()), None))
        return found

    @property
    def slowest(self) -> int | None:
        """The rank with the least progress, the lowest of equal ones; None before the first report."""
        ranks = self.ranks
        return min(ranks, key=lambda rank: (ranks[rank].done, rank), default=None)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the slowest rank is done; None if no report names a total, or too few reports have arrived."""
        if self.slowest is None or self.total is None:
            return None
        found = self.ranks[self.slowest]
        return max(0.0, self.total - found.done) / found.rate if found.rate else None
