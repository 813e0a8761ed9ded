"""Presents the reports of rank 0 as rows, a throughput, a table, and a curve of plain text.

The functions are pure. They take the events of a run (`rankzero.RunHandle.events`) or rows made of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

KEPT_ROWS = 200
"""Half of the most reports that are kept in memory: enough points for a curve."""

PROGRESS = {"samples": "samples", "tokens": "tokens", "step": "steps", "epoch": "epochs"}
"""Metrics that count work, with their plurals. The first that was reported gives the throughput."""

STEP_NAMES = ("step", "global_step", "iteration", "epoch")
"""Metrics that count steps. The first that was reported is the horizontal axis of a curve."""

TABLE_COLUMNS = 8
CURVE_WIDTH = 40
_BARS = "▁▂▃▄▅▆▇█"


class OfTraining:
    """A filter for the events of the last training with a run id, without those of earlier trainings.

    Call it with the events of a run in their order.

    Args:
        fresh_since: The first attempt of the training: `Job.fresh_since`.
    """

    def __init__(self, fresh_since: int) -> None:
        self._fresh_since = fresh_since
        self._has_begun = fresh_since == 0

    def __call__(self, event: Mapping[str, Any]) -> bool:
        """Returns True if the event belongs to the last training."""
        if event.get("type") == "state" and isinstance(event.get("attempt"), int):
            self._has_begun = self._has_begun or event["attempt"] >= self._fresh_since
        return self._has_begun


class RowKeeper:
    """Keeps every n-th report of rank 0 and the last one, so that a long training does not fill the memory."""

    def __init__(self) -> None:
        self._kept: list[dict[str, Any]] = []
        self._last: dict[str, Any] | None = None
        self._every, self._count = 1, 0

    def add(self, event: Mapping[str, Any]) -> None:
        """Adds the next report of rank 0."""
        # Set twice: first for the order of columns, then to override a metric of the same name.
        self._last = {"report": 0} | event["metrics"] | {"report": self._count + 1, "time": event["time"]}
        if self._count % self._every == 0:
            self._kept.append(self._last)
            if len(self._kept) > 2 * KEPT_ROWS:
                self._kept, self._every = self._kept[::2], self._every * 2
        self._count += 1

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Returns the kept reports, each with its number under ``report`` and its Unix time under ``time``."""
        if self._last is None or self._kept[-1] is self._last:
            return list(self._kept)
        return [*self._kept, self._last]


def rows_of(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the reports of rank 0, each with its number under ``report`` and its Unix time under ``time``.

    Args:
        events: Events of a run, oldest first.

    Returns:
        Every n-th report and the last one, as `RowKeeper` keeps them.
    """
    keeper = RowKeeper()
    for event in events:
        if event["type"] == "metric" and event["rank"] == 0:
            keeper.add(event)
    return keeper.rows


def evenly(rows: Sequence[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """Returns at most ``limit`` (2 or more) of the rows, including the first and the last."""
    if len(rows) <= limit:
        return list(rows)
    return [rows[round(index * (len(rows) - 1) / (limit - 1))] for index in range(limit)]


def throughput(rows: Sequence[Mapping[str, Any]], counts: Mapping[str, str] = PROGRESS) -> dict[str, float]:
    """Returns, for example, ``{"steps_per_second": 12.5}`` for the first of ``counts`` that grew; empty if none did.

    Only the last interval over which the count grew is measured, since a restarted training counts from its start.
    """
    for name, many in counts.items():
        counted = [row for row in rows if is_number(row.get(name))]
        first = len(counted) - 1
        while first > 0 and counted[first - 1][name] <= counted[first][name]:
            first -= 1
        if first < len(counted) - 1:
            done = float(counted[-1][name]) - float(counted[first][name])
            seconds = counted[-1]["time"] - counted[first]["time"]
            if done > 0 and seconds > 0 and math.isfinite(done / seconds):
                return {f"{many}_per_second": float(f"{done / seconds:.4g}")}
    return {}


def loss_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the names of metrics that contain "loss", in the order of their first report."""
    return [name for name in dict.fromkeys(name for row in rows for name in row) if "loss" in name.lower()]


def curve(rows: Sequence[Mapping[str, Any]], name: str) -> str | None:
    """Returns the curve of a metric as one line of text; None if it has fewer than two finite values.

    Example:
        >>> curve([{"loss": 3.0}, {"loss": 2.0}, {"loss": 1.0}], "loss")
        '█▅▁ 3 → 1'
    """
    finite = [row for row in rows if is_number(row.get(name))]
    if len(finite) < 2:
        return None
    values = [float(row[name]) for row in evenly([dict(row) for row in finite], CURVE_WIDTH)]
    low, high = min(values), max(values)
    bars = "".join(_BARS[round(height_of(value, low, high) * (len(_BARS) - 1))] for value in values)
    return f"{bars} {values[0]:.4g} → {values[-1]:.4g}"


def height_of(value: float, low: float, high: float) -> float:
    """Returns the height of a value between the lowest and the highest value of a curve: 0.0 to 1.0.

    Example:
        >>> height_of(0.0, -1.7e308, 1.7e308)
        0.5
    """
    # Halved, since the difference of two floats may overflow.
    span = high / 2 - low / 2
    return (value / 2 - low / 2) / span if span else 0.0


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the rows as a table: aligned lines of text, names of columns first, at most `TABLE_COLUMNS` columns."""
    names = list(dict.fromkeys(name for row in rows for name in row if name != "time"))[:TABLE_COLUMNS]
    cells = [names, *([_text(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]


def is_number(value: object) -> TypeGuard[int | float]:
    """Returns True if a value can be plotted: it is a finite number and not a bool."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        # The integer is too large for a float.
        return False


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)
