"""`History`: what happened in a run, from its events, one after the other, in bounded memory.

A `Curve` has few points, and looks like one with many.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

from rankzero.run.reports import PROGRESS, STEP_NAMES, TOTALS, OfTraining, RowKeeper, is_number, throughput

MAX_METRICS = 60
"""Curves that a report draws; the names of the others are listed."""

MAX_NAMES = 1_000
"""Names of metrics that are known at all."""

MAX_MARKS = 500
"""Checkpoints, failures, restarts and the like that a report shows: the first half and the last."""

MAX_GAPS = 512
"""Last pauses between two reports of a rank, by which a straggler is found."""

TEXT = 2_000
"""Characters of a text that are shown."""

SLOWER = 1.2
"""A rank that takes so many times as long between two reports as the median rank is named as the straggler."""

_MARKS = ("checkpoint", "failure", "restart", "waiting", "world", "bad-host", "engine", "state")
_USAGE = ("cpu", "memory", "received", "sent")


class History:
    """Accumulates the events of one training.

    Args:
        fresh_since: The first attempt of this training: events of another one, which had the run id before, do not
            count.
    """

    def __init__(self, fresh_since: int) -> None:
        self._is_ours = OfTraining(fresh_since)
        self._attempt = 0
        self._counts = RowKeeper()
        self.names: dict[str, None] = {}
        self._curves: dict[str, dict[int, Curve]] = {}
        self._reports: dict[int, int] = defaultdict(int)
        self._reported: dict[int, float] = {}
        self._gaps: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=MAX_GAPS))
        self._ranks: dict[tuple[int, int], dict[str, Any]] = {}
        self._first_marks: list[dict[str, Any]] = []
        self._last_marks: deque[dict[str, Any]] = deque(maxlen=MAX_MARKS // 2)
        self._usage: dict[str, dict[str, Curve]] = {}
        self._totals: dict[str, dict[str, Any]] = {}

    def add(self, event: object) -> None:
        """Takes the next event; one that is none is left out."""
        if not (isinstance(event, dict) and is_number(event.get("time")) and isinstance(event.get("type"), str)):
            return
        if not self._is_ours(event):
            return
        kind = event["type"]
        if kind == "state" and isinstance(event.get("attempt"), int):
            self._attempt = event["attempt"]
            self._counts.add(event)
        if kind == "metric":
            self._add_metrics(event)
        elif kind == "usage":
            self._add_usage(event)
        if kind in ("entered", "returned", "failure", "metric"):
            self._add_phase(kind, event)
        if kind in _MARKS:
            self._add_mark(kind, event)

    def _add_metrics(self, event: Mapping[str, Any]) -> None:
        rank, row, when = event.get("rank"), event.get("metrics"), event["time"]
        if not isinstance(rank, int) or not isinstance(row, dict):
            return
        if counts := {name: row[name] for name in PROGRESS if name in row}:
            self._counts.add({**event, "metrics": counts})
        self._reports[rank] += 1
        if rank in self._reported:
            self._gaps[rank].append(when - self._reported[rank])
        self._reported[rank] = when
        for name in row:
            if len(self.names) < MAX_NAMES and name not in TOTALS:
                self.names.setdefault(name, None)
        step = row.get(self.step_name) if self.step_name else None
        at = float(step) if is_number(step) else float(self._reports[rank])
        for name in row:
            if is_number(row[name]) and name not in TOTALS and (name in self._curves or self._may_draw(name)):
                of_name = self._curves.setdefault(name, {})
                limit = MAX_POINTS if rank == 0 else budget(sum(map(len, self._curves.values())))
                of_name.setdefault(rank, Curve()).add((when, at, float(row[name])), limit)

    def _may_draw(self, name: str) -> bool:
        return name in PROGRESS or name in STEP_NAMES or len(self._curves) < MAX_METRICS + len(PROGRESS)

    @property
    def step_name(self) -> str | None:
        """The metric that is the steps; None: reports are counted."""
        return next((name for name in STEP_NAMES if name in self.names), None)

    def _add_usage(self, event: Mapping[str, Any]) -> None:
        host, when = str(event.get("host"))[:TEXT], event["time"]
        gpus = event.get("gpus") if isinstance(event.get("gpus"), list) else []
        values = {name: event.get(name) for name in _USAGE}
        totals = self._totals.setdefault(host, {})
        totals |= {name: event[name] for name in ("cores", "memory_total") if is_number(event.get(name))}
        for index, gpu in enumerate(gpus or []):
            # One that did not answer is None.
            if isinstance(gpu, dict):
                values |= {f"gpu {index} {name}": gpu.get(name) for name in ("use", "memory")}
                totals["gpu_memory_total"] = gpu.get("memory_total")
        curves = self._usage.setdefault(host, {})
        for name, value in values.items():
            if is_number(value):
                curve = curves.setdefault(name, Curve())
                curve.add((when, float(curve.count), float(value)), MAX_POINTS)

    def _add_phase(self, kind: str, event: Mapping[str, Any]) -> None:
        """When each rank of each attempt started, had torch, entered the user's code, reported last, ended, and how."""
        rank, attempt = event.get("rank"), event.get("attempt", self._attempt)
        if not isinstance(rank, int) or not isinstance(attempt, int):
            return
        if kind == "entered":
            facts = {name: event.get(name) for name in ("host", "started", "imported", "torch")}
            own = {"rank": rank, "attempt": attempt, "entered": event["time"], "reports": 0}
            self._ranks[attempt, rank] = {**facts, **own}
        elif known := self._ranks.get((attempt, rank)):
            if kind == "metric":
                known |= {"reported": event["time"], "reports": known["reports"] + 1}
            elif kind == "returned":
                known |= {"ended": event["time"], "outcome": "returned"}
            else:
                known |= {"ended": event["time"], "outcome": "failed", "what": str(event.get("what"))[:TEXT]}

    def _add_mark(self, kind: str, event: Mapping[str, Any]) -> None:
        text = str(event.get("what", kind))
        if kind == "checkpoint":
            text = f"checkpoint {event.get('id')}"
        elif kind == "state":
            text = f"attempt {event.get('attempt')} is {event.get('state')}"
        mark = {"type": kind, "time": event["time"], "rank": event.get("rank"), "text": text[:TEXT]}
        if len(self._first_marks) < MAX_MARKS // 2:
            self._first_marks.append(mark)
        else:
            self._last_marks.append(mark)

    # -- what the page shows ---------------------------------------------------------------------

    def curves(self) -> list[dict[str, Any]]:
        """A metric's curve for each rank that reported it: columns of times, steps and values."""
        drawn = {name: ranks for name, ranks in self._curves.items() if name not in STEP_NAMES}
        limit = budget(sum(map(len, drawn.values())))
        return [
            {
                "name": name,
                "ranks": [
                    {"rank": rank, **curve.columns(MAX_POINTS if rank == 0 else limit)}
                    for rank, curve in sorted(ranks.items())
                ],
            }
            for name, ranks in list(drawn.items())[:MAX_METRICS]
        ]

    def not_drawn(self) -> list[str]:
        """Names of metrics that have no curve, since there are too many."""
        drawn = [name for name in self._curves if name not in STEP_NAMES][:MAX_METRICS]
        return [name for name in self._curves if name not in (*drawn, *STEP_NAMES)] + [
            name for name in self.names if name not in self._curves and len(self._curves) >= MAX_METRICS
        ]

    def throughput(self) -> dict[str, float]:
        """Returns the throughput of rank 0: see `rankzero.run.reports.throughput`."""
        return throughput(self._counts.rows)

    def ranks(self) -> list[dict[str, Any]]:
        """Each rank in each attempt."""
        return [self._ranks[key] for key in sorted(self._ranks)]

    def straggler(self) -> dict[str, Any] | None:
        """The rank whose last reports are furthest apart, if it stands out from the others."""
        several = {rank: found for rank, found in self._gaps.items() if len(found) > 1}
        if len(several) < 2:
            return None
        # Imported here, so that most drivers do not load it.
        import statistics

        gaps = {rank: statistics.median(found) for rank, found in several.items()}
        slowest = max(gaps, key=lambda rank: gaps[rank])
        usual = statistics.median(gap for rank, gap in gaps.items() if rank != slowest)
        if usual <= 0 or gaps[slowest] < SLOWER * usual:
            return None
        return {"rank": slowest, "seconds": gaps[slowest], "usual": usual}

    def marks(self) -> list[dict[str, Any]]:
        """Returns the checkpoints, failures, restarts and similar events."""
        return list(itertools.chain(self._first_marks, self._last_marks))

    def hosts(self) -> list[dict[str, Any]]:
        """Returns the usage of processors, memory, network and GPUs of each host."""
        return [
            {
                "host": host,
                **self._totals[host],
                "columns": {name: curve.columns(MAX_POINTS) for name, curve in curves.items()},
            }
            for host, curves in sorted(self._usage.items())
        ]


Point = tuple[float, float, float]
"""Unix time, step, value."""

MAX_POINTS = 600
"""Of a curve of rank 0, and of a host's use: about one for each pixel."""

POINTS_OF_OTHERS = 24_000
"""Of the curves of all other ranks together."""

LEAST_POINTS = 24


def budget(num_curves: int) -> int:
    """Points that each of so many curves of other ranks may have."""
    return max(LEAST_POINTS, min(MAX_POINTS, POINTS_OF_OTHERS // max(1, num_curves)))


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """At most ``limit`` (4 or more) of the points, in their order: the first, the last, and the extremes between.

    Each stretch of the curve keeps its lowest and its highest point, so that no spike is lost.
    """
    if len(points) <= limit:
        return list(points)
    inner, stretches = points[1:-1], (limit - 2) // 2
    kept = [points[0]]
    for index in range(stretches):
        stretch = inner[index * len(inner) // stretches : (index + 1) * len(inner) // stretches]
        low, high = min(stretch, key=_value), max(stretch, key=_value)
        # Both are points of the stretch, so their order in time is that of their steps' places.
        kept += sorted({low, high})
    return [*kept, points[-1]]


class Curve:
    """A curve that grows, and never takes more memory than twice its limit of points."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.count = 0
        """Points that were added."""

    def add(self, point: Point, limit: int) -> None:
        """Adds the newest point; of the older ones at most ``limit`` stay."""
        self.count += 1
        self.points.append(point)
        if len(self.points) > 2 * limit:
            self.points = thin(self.points, limit)

    def columns(self, limit: int) -> dict[str, list[float]]:
        """Times, steps and values of at most ``limit`` points."""
        if not self.points:
            return {"t": [], "s": [], "v": []}
        times, steps, values = zip(*thin(self.points, limit), strict=True)
        # Integers keep all digits.
        shown = [value if value.is_integer() else float(f"{value:.6g}") for value in values]
        return {"t": [round(when, 3) for when in times], "s": list(steps), "v": shown}


def _value(point: Point) -> float:
    return point[2]
