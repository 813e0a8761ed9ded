"""Makes rows of the reports of rank 0, and computes the throughput.

The functions are pure. They take the events of a run (`rankzero.RunHandle.events`) or rows made of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

KEPT_ROWS = 200  # Half of the most reports that are kept in memory: enough points for a curve

PROGRESS = {"samples": "samples", "tokens": "tokens", "step": "steps", "epoch": "epochs"}
"""Metrics that count work, with their plurals. The first that was reported gives the throughput."""

TOTALS = frozenset(f"total_{many}" for many in PROGRESS.values())  # Metrics that name the work of the whole training
STEP_NAMES = ("step", "global_step", "iteration", "epoch")  # The first that was reported is the axis of a curve
CHECK_PREFIX = "check/"  # Prefix of the names of metrics that an orchestrator shows as checks
MOST_METRICS = 1000  # Most names of metrics in a status, and as many of checks; the events have all names
UNSHOWN = frozenset({"time", "attempt"})  # Columns of a row of reports that are no metrics


def as_row(metrics: Mapping[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Returns a report's metrics and rankzero's own columns; a metric of the same name is ``metrics.NAME``."""
    return {f"metrics.{name}" if name in own else name: value for name, value in metrics.items()} | own


class RowKeeper:
    """Keeps every n-th report of rank 0 and the last one, so that a long training does not fill the memory."""

    def __init__(self) -> None:
        self._kept: list[dict[str, Any]] = []
        self._last: dict[str, Any] | None = None
        self._every, self._count = 1, 0
        self._attempt: dict[str, Any] = {}

    def add(self, event: Mapping[str, Any]) -> None:
        """Adds the next event: a report of rank 0 becomes a row; a change of state names the attempt of later ones."""
        if event["type"] == "state":
            self._attempt = {"attempt": event["attempt"]} if "attempt" in event else {}
        if event["type"] != "metric" or event["rank"] != 0:
            return
        own = {"report": self._count + 1, "time": event["time"]} | self._attempt
        # The number of the report is the first column.
        self._last = {"report": 0} | as_row(event["metrics"], own)
        if self._count % self._every == 0:
            self._kept.append(self._last)
            if len(self._kept) > 2 * KEPT_ROWS:
                self._kept, self._every = self._kept[::2], self._every * 2
        self._count += 1

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Returns the kept reports, each with its number under ``report``, its Unix ``time`` and its ``attempt``."""
        if self._last is None or self._kept[-1] is self._last:
            return list(self._kept)
        return [*self._kept, self._last]


def rows_of(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the reports of rank 0 among the events of a run, as `RowKeeper.rows` does."""
    keeper = RowKeeper()
    for event in events:
        keeper.add(event)
    return keeper.rows


def throughput(rows: Sequence[Mapping[str, Any]], counts: Mapping[str, str] = PROGRESS) -> dict[str, float]:
    """Returns, for example, ``{"steps_per_second": 12.5}`` for the first of ``counts`` that grew; empty if none did.

    Each attempt is measured from its first report to its last, so the wait for the next attempt is no training time. Of
    an attempt whose count fell, only the last interval over which it grew is measured.
    """
    for name, many in counts.items():
        done = seconds = 0.0
        counted = [row for row in rows if is_number(row.get(name))]
        for _, (first, *later) in itertools.groupby(counted, lambda row: row.get("attempt")):
            last = first
            for row in later:
                first, last = first if last[name] <= row[name] else row, row
            done += float(last[name]) - float(first[name])
            seconds += last["time"] - first["time"]
        if done > 0 and seconds > 0 and math.isfinite(done / seconds):
            return {f"{many}_per_second": float(f"{done / seconds:.4g}")}
    return {}


def is_number(value: object) -> TypeGuard[int | float]:
    """Returns True if a value can be plotted: it is a finite number and not a bool."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        # The integer is too large for a float.
        return False
