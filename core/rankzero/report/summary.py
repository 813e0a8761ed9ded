"""`Summary`: what happened in a run, from its events, one after the other, in bounded memory.

The page, the card of notebooks and the terminal's line show it. A `Curve` has few points, and looks like one with many.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankzero.run.growing import Stream
from rankzero.run.handle import RunHandle
from rankzero.run.names import EVENTS
from rankzero.run.output import events_of
from rankzero.run.reports import PROGRESS, STEP_NAMES, TOTALS, UNSHOWN, RowKeeper, is_number, throughput
from rankzero.run.status import RunStatus

MAX_METRICS = 60
"""Curves that are kept; the names of the other metrics are listed."""

MAX_NAMES = 1_000
"""Names of metrics that are known at all."""

MAX_MARKS = 500
"""Checkpoints, failures, restarts and the like that are kept: the first half and the last."""

RATE_ROWS = 32
"""Newest reports of a rank from which its rate is computed, and by whose pauses a straggler is found."""

TEXT = 2_000
"""Characters of a text that are kept."""

SLOWER = 1.2
"""A rank that takes so many times as long between two reports as the median rank is named as the straggler."""

REPORTS = "reports"
"""The unit of a run whose reports count nothing."""

COUNTED = frozenset({"report", *UNSHOWN, *PROGRESS, *TOTALS})
"""Names in a row of reports that are counts or times and no results."""

MAX_POINTS = 600
"""Points of a curve of rank 0, and of a host's use: about one for each pixel."""

POINTS_OF_OTHERS = 24_000
"""Points of the curves of all other ranks together."""

LEAST_POINTS = 24

_MARKS = ("checkpoint", "failure", "restart", "waiting", "world", "bad-host", "engine", "state")
_USAGE = ("cpu", "memory", "received", "sent")

Point = tuple[float, float, float]
"""Unix time, step, value; a value that is not finite is a gap of the curve."""


@dataclass(frozen=True)
class RankProgress:
    """The progress of one rank.

    Attributes:
        done: The number of units (`Summary.unit`) that are done.
        rate: Units for each second; None before the second report.
    """

    done: float
    rate: float | None


class Summary:
    """Reads each event of a training once."""

    def __init__(self) -> None:
        self._stream: Stream | None = None
        self._attempt = 0
        self._keeper = RowKeeper()
        self._newest: dict[int, deque[dict[str, Any]]] = {}
        self._num_reports: dict[int, int] = {}
        self._names: dict[str, None] = {}
        self._curves: dict[str, dict[int, Curve]] = {}
        self._timeline: dict[tuple[int, int], dict[str, Any]] = {}
        self._hosts: dict[str, tuple[dict[str, Any], dict[str, Curve]]] = {}
        self.total: float | None = None
        """The units of the whole training, which ranks report as ``total_steps``, ``total_epochs`` and the like."""
        self.marks: list[dict[str, Any]] = []
        """Checkpoints, failures, restarts and similar events, oldest first."""

    def read(self, handle: RunHandle[Any], status: RunStatus) -> None:
        """Reads the new events of a run, always of the same one, with its status that was just read. Raises OSError."""
        self._stream = self._stream or handle.stream(EVENTS)
        for event in events_of(self._stream.new(status)):
            self.add(event)

    def add(self, event: object) -> None:
        """Takes the next event; one that is none is left out."""
        if not (isinstance(event, dict) and is_number(event.get("time")) and isinstance(event.get("type"), str)):
            return
        kind = event["type"]
        if kind == "state" and isinstance(event.get("attempt"), int):
            self._attempt = event["attempt"]
            self._keeper.add(event)
            if event.get("state") == "starting":
                # Each rank of the next attempt counts from its own start, and there may be fewer ranks.
                self._newest, self.total = {}, None
        if kind == "metric":
            self._add_report(event)
        elif kind == "usage":
            self._add_usage(event)
        if kind in ("entered", "returned", "failure", "metric"):
            self._add_phase(kind, event)
        if kind in _MARKS:
            texts = {
                "checkpoint": f"checkpoint {event.get('id')}",
                "state": f"attempt {event.get('attempt')} is {event.get('state')}",
            }
            text = texts.get(kind, str(event.get("what", kind)))
            self.marks.append({"type": kind, "time": event["time"], "rank": event.get("rank"), "text": text[:TEXT]})
            if len(self.marks) > MAX_MARKS:
                del self.marks[MAX_MARKS // 2]

    def _add_report(self, event: Mapping[str, Any]) -> None:
        rank, metrics = event.get("rank"), event.get("metrics")
        if not isinstance(rank, int) or not isinstance(metrics, dict):
            return
        self._keeper.add(event)
        newest = self._newest.setdefault(rank, deque(maxlen=RATE_ROWS))
        # A count that is missing in this report keeps its value of an earlier one.
        counted = {name: newest[-1][name] for name in PROGRESS if newest and name in newest[-1]}
        counted |= {name: metrics[name] for name in PROGRESS if is_number(metrics.get(name))}
        newest.append({**counted, "time": event["time"], REPORTS: newest[-1][REPORTS] + 1 if newest else 1})
        number = self._num_reports[rank] = self._num_reports.get(rank, 0) + 1
        for name, value in metrics.items():
            if name in TOTALS:
                if is_number(value) and name.removeprefix("total_") == self.unit:
                    self.total = value
            elif len(self._names) < MAX_NAMES:
                self._names.setdefault(name, None)
        step = metrics.get(self.step_name)
        at = float(step) if is_number(step) else float(number)
        for name, value in metrics.items():
            is_gap = isinstance(value, float) and not math.isfinite(value)
            if (is_number(value) or is_gap) and name not in TOTALS and name not in STEP_NAMES and self._is_drawn(name):
                curve = self._curves.setdefault(name, {}).setdefault(rank, Curve())
                curve.add((event["time"], at, float(value)), self._limit(rank))

    def _is_drawn(self, name: str) -> bool:
        return name in self._curves or len(self._curves) < MAX_METRICS

    def _limit(self, rank: int) -> int:
        """Returns the most points of a curve of this rank."""
        if rank == 0:
            return MAX_POINTS
        return max(LEAST_POINTS, min(MAX_POINTS, POINTS_OF_OTHERS // max(1, sum(map(len, self._curves.values())))))

    def _add_usage(self, event: Mapping[str, Any]) -> None:
        sizes, curves = self._hosts.setdefault(str(event.get("host"))[:TEXT], ({}, {}))
        values = {name: event.get(name) for name in _USAGE}
        sizes |= {name: event[name] for name in ("cores", "memory_total") if is_number(event.get(name))}
        gpus = event.get("gpus")
        for index, gpu in enumerate(gpus if isinstance(gpus, list) else []):
            # One that did not answer is None.
            if isinstance(gpu, dict):
                values |= {f"gpu {index} {name}": gpu.get(name) for name in ("use", "memory")}
                sizes["gpu_memory_total"] = gpu.get("memory_total")
        for name, value in values.items():
            if is_number(value):
                curves.setdefault(name, Curve()).add((event["time"], 0.0, float(value)), MAX_POINTS)

    def _add_phase(self, kind: str, event: Mapping[str, Any]) -> None:
        rank, attempt = event.get("rank"), event.get("attempt", self._attempt)
        if not isinstance(rank, int) or not isinstance(attempt, int):
            return
        if kind == "entered":
            facts = {name: event.get(name) for name in ("host", "started", "imported", "torch")}
            own = {"rank": rank, "attempt": attempt, "entered": event["time"], "reports": 0}
            self._timeline[attempt, rank] = {**facts, **own}
        elif known := self._timeline.get((attempt, rank)):
            if kind == "metric":
                known |= {"reported": event["time"], "reports": known["reports"] + 1}
            elif kind == "returned":
                known |= {"ended": event["time"], "outcome": "returned"}
            else:
                known |= {"ended": event["time"], "outcome": "failed", "what": str(event.get("what"))[:TEXT]}

    # -- progress --------------------------------------------------------------------------------

    @property
    def _counts(self) -> str:
        rows = self._newest.get(0) or next(iter(self._newest.values()), None)
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
        return {name: value for row in self.rows[-1:] for name, value in row.items() if name not in COUNTED}

    @property
    def ranks(self) -> dict[int, RankProgress]:
        """The progress of each rank of the current attempt that has reported."""
        name, found = self._counts, {}
        for rank, rows in sorted(self._newest.items()):
            if name in rows[-1]:
                speed = throughput(rows, {name: self.unit})
                found[rank] = RankProgress(rows[-1][name], next(iter(speed.values()), None))
        return found

    @property
    def slowest(self) -> RankProgress | None:
        """The progress of the rank with the least; None before the first report."""
        return min(self.ranks.values(), key=lambda found: found.done, default=None)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the slowest rank is done; None if no report names a total, or too few reports have arrived."""
        slowest = self.slowest
        if slowest is None or self.total is None or not slowest.rate:
            return None
        return max(0.0, self.total - slowest.done) / slowest.rate

    @property
    def step_name(self) -> str:
        """The metric that is the steps; empty: reports are counted."""
        return next((name for name in STEP_NAMES if name in self._names), "")

    # -- what the page shows ---------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Returns, as JSON, progress, curves, timeline, marks and the usage of hosts."""
        slowest = self.slowest
        progress = {"total": self.total, "unit": self.unit, "seconds_left": self.seconds_left}
        undrawn = (name for name in self._names if name not in (*self._curves, *STEP_NAMES))
        return {
            "progress": slowest and {"done": slowest.done, **progress},
            "throughput": throughput(self.rows),
            "steps": self.step_name or None,
            "curves": [
                {
                    "name": name,
                    "ranks": [{"rank": rank, **ranks[rank].columns(self._limit(rank))} for rank in sorted(ranks)],
                }
                for name, ranks in self._curves.items()
            ],
            "not_drawn": [name for name in undrawn if not self._is_drawn(name)],
            "ranks": [self._timeline[key] for key in sorted(self._timeline)],
            "straggler": self._straggler(),
            "marks": self.marks,
            "hosts": [
                {"host": host, **sizes, "columns": {name: curve.columns(MAX_POINTS) for name, curve in curves.items()}}
                for host, (sizes, curves) in sorted(self._hosts.items())
            ],
        }

    def _straggler(self) -> dict[str, Any] | None:
        """Returns the rank whose newest reports are furthest apart, if it stands out from the others."""
        gaps = {}
        for rank, rows in self._newest.items():
            if len(rows) > 2:
                gaps[rank] = statistics.median(late["time"] - early["time"] for early, late in itertools.pairwise(rows))
        slowest = max(gaps, key=lambda rank: gaps[rank], default=None)
        others = [gap for rank, gap in gaps.items() if rank != slowest]
        if slowest is None or not others or not 0 < SLOWER * statistics.median(others) <= gaps[slowest]:
            return None
        return {"rank": slowest, "seconds": gaps[slowest], "usual": statistics.median(others)}


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """Returns at most ``limit`` (4 or more) of the points, in their order: the first, the last, extremes between.

    Each stretch of the curve keeps its lowest and its highest point, so that no spike is lost; one without a finite
    value keeps its gap.
    """
    if len(points) <= limit:
        return list(points)
    inner, stretches = points[1:-1], (limit - 2) // 2
    kept = [points[0]]
    for index in range(stretches):
        stretch = inner[index * len(inner) // stretches : (index + 1) * len(inner) // stretches]
        finite = [point for point in stretch if math.isfinite(point[2])] or stretch[:1]
        # Both are points of the stretch, so their order in time is that of their steps' places.
        kept += sorted({min(finite, key=_value), max(finite, key=_value)})
    return [*kept, points[-1]]


class Curve:
    """A curve that grows, and never takes more memory than twice its limit of points."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def add(self, point: Point, limit: int) -> None:
        """Adds the newest point; of the older ones at most ``limit`` stay."""
        self.points.append(point)
        if len(self.points) > 2 * limit:
            self.points = thin(self.points, limit)

    def columns(self, limit: int) -> dict[str, list[Any]]:
        """Returns times, steps and values of at most ``limit`` points; the value of a gap is None."""
        times, steps, values = zip(*thin(self.points, limit), strict=True)
        return {"t": [round(when, 3) for when in times], "s": list(steps), "v": [*map(_shown, values)]}


def _value(point: Point) -> float:
    return point[2]


def _shown(value: float) -> float | None:
    """Returns a value with six digits, and an integer with all; None for one that is not finite."""
    if not math.isfinite(value):
        return None
    return value if value.is_integer() else float(f"{value:.6g}")
