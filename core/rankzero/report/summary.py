"""`Summary`: what happened in a run, from its events, in bounded memory; and `usage`, what the run has cost.

The page, the card of notebooks and the terminal's line show it. A `Curve` has few points, and looks like one with many.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rankzero.errors import InvalidJobError
from rankzero.job import Job
from rankzero.run.directory import EVENTS
from rankzero.run.handle import RunHandle
from rankzero.run.lines import Stream, events_of
from rankzero.run.reports import PROGRESS, STEP_NAMES, TOTALS, UNSHOWN, RowKeeper, is_number, throughput
from rankzero.run.status import RunStatus

MAX_METRICS = 60  # Metrics that have curves
MAX_MARKS = 500  # Checkpoints, failures, restarts and the like that are kept: the first half and the last
MAX_POINTS = 600  # Points of a curve of rank 0, and of a host's use: about one for each pixel
POINTS_OF_OTHERS = 24_000  # Over the number of curves: the points of the next curve of another rank
LEAST_POINTS = 24
RATE_ROWS = 32  # Newest reports of a rank from which its rate is computed
TEXT = 2_000  # Characters of a text that are kept
REPORTS = "reports"  # The unit of a run whose reports count nothing

# Names in a row of reports that are counts or times and no results.
_COUNTED = frozenset({"report", *UNSHOWN, *PROGRESS, *TOTALS})
_MARKS = ("checkpoint", "failure", "restart", "waiting", "world", "bad-host", "engine", "state")
_USAGE = ("cpu", "memory")

Point = tuple[float, float, float]  # Unix time, step, value; a value that is not finite is a gap of the curve


class RankProgress(NamedTuple):
    """The progress of one rank: the units that are done, and those for each second (None before the second report)."""

    done: float
    rate: float | None


class Summary:
    """Reads each event of a training once."""

    def __init__(self) -> None:
        self._stream: Stream | None = None
        self._attempt = 0
        self._keeper = RowKeeper()
        self._newest: dict[int, deque[dict[str, Any]]] = {}
        self._steps: set[str] = set()
        self._curves: dict[str, dict[int, Curve]] = {}
        self._timeline: dict[tuple[int, int], dict[str, Any]] = {}
        self._hosts: dict[str, tuple[dict[str, Any], dict[str, Curve]]] = {}
        self._marks: list[dict[str, Any]] = []
        self.total: float | None = None
        """The units of the whole training, which ranks report as ``total_steps``, ``total_epochs`` and the like."""

    def read(self, handle: RunHandle[Any], status: RunStatus) -> None:
        """Reads the new events of a run, always of the same one, with its status that was just read. Raises OSError."""
        self._stream = self._stream or handle.stream(EVENTS)
        for event in events_of(self._stream.new(status)):
            self.add(event)

    def add(self, event: object) -> None:
        """Takes the next event; one that is none is left out."""
        if not (isinstance(event, dict) and is_number(event.get("time")) and isinstance(event.get("type"), str)):
            return
        kind, rank = event["type"], event.get("rank")
        if kind == "state" and isinstance(event.get("attempt"), int):
            self._attempt = event["attempt"]
            self._keeper.add(event)
            if event.get("state") == "starting":
                # Each rank of the next attempt counts from its own start, and there may be fewer ranks.
                self._newest, self.total = {}, None
        if kind == "metric" and isinstance(rank, int) and isinstance(event.get("metrics"), dict):
            self._add_report(event, rank, event["metrics"])
        if kind == "usage":
            self._add_usage(event)
        if kind in ("entered", "returned", "failure", "metric") and isinstance(rank, int):
            self._add_phase(kind, event, rank)
        if kind in _MARKS:
            text = f"attempt {event.get('attempt')} is {event.get('state')}" if kind == "state" else event.get("what")
            text = text or " ".join(str(event[name]) for name in ("type", "id") if name in event)
            self._marks.append({"type": kind, "time": event["time"], "rank": rank, "text": str(text)[:TEXT]})
            if len(self._marks) > MAX_MARKS:
                del self._marks[MAX_MARKS // 2]

    def _add_report(self, event: Mapping[str, Any], rank: int, metrics: Mapping[str, Any]) -> None:
        self._keeper.add(event)
        newest = self._newest.setdefault(rank, deque(maxlen=RATE_ROWS))
        before = newest[-1] if newest else {REPORTS: 0}
        # A count that is missing in this report keeps its value of an earlier one.
        counts = {name: metrics[name] for name in PROGRESS if is_number(metrics.get(name))}
        newest.append({**before, **counts, "time": event["time"], REPORTS: before[REPORTS] + 1})
        self._steps.update(name for name in STEP_NAMES if name in metrics)
        step = metrics.get(self.step_name)
        at = float(step) if is_number(step) else float(newest[-1][REPORTS])
        for name, value in metrics.items():
            if name in TOTALS and is_number(value) and name.removeprefix("total_") == self.unit:
                self.total = value
            is_value = is_number(value) or (isinstance(value, float) and not math.isfinite(value))
            is_drawn = name in self._curves or len(self._curves) < MAX_METRICS
            if is_value and is_drawn and name not in TOTALS and name not in STEP_NAMES:
                curves = self._curves.setdefault(name, {})
                if rank not in curves:
                    share = POINTS_OF_OTHERS // sum(map(len, self._curves.values()), 1)
                    curves[rank] = Curve(max(LEAST_POINTS, min(MAX_POINTS, share)) if rank else MAX_POINTS)
                curves[rank].add((event["time"], at, float(value)))

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
                curves.setdefault(name, Curve()).add((event["time"], 0.0, float(value)))

    def _add_phase(self, kind: str, event: Mapping[str, Any], rank: int) -> None:
        attempt = event.get("attempt", self._attempt)
        if not isinstance(attempt, int):
            return
        if kind == "entered":
            facts = {name: event.get(name) for name in ("host", "started", "imported", "torch")}
            own = {"rank": rank, "attempt": attempt, "entered": event["time"], "reports": 0}
            self._timeline[attempt, rank] = {**facts, **own}
        elif known := self._timeline.get((attempt, rank)):
            if kind == "metric":
                known |= {"reported": event["time"], "reports": known["reports"] + 1}
            else:
                known |= {"ended": event["time"], "outcome": "returned" if kind == "returned" else "failed"}
                known |= {"what": str(event["what"])[:TEXT]} if "what" in event else {}

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
        return {name: value for row in self.rows[-1:] for name, value in row.items() if name not in _COUNTED}

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
        return next((name for name in STEP_NAMES if name in self._steps), "")

    def facts(self) -> dict[str, Any]:
        """Returns, as JSON, progress, curves, timeline, marks and the usage of hosts."""
        slowest = self.slowest
        done = slowest and {"done": slowest.done, "total": self.total, "unit": self.unit}
        return {
            "progress": done and {**done, "seconds_left": self.seconds_left},
            "throughput": throughput(self.rows),
            "steps": self.step_name or None,
            "curves": [
                {"name": name, "ranks": [{"rank": rank, **ranks[rank].columns()} for rank in sorted(ranks)]}
                for name, ranks in self._curves.items()
            ],
            "ranks": [self._timeline[key] for key in sorted(self._timeline)],
            "marks": self._marks,
            "hosts": [
                {"host": host, **sizes, "columns": {name: curve.columns() for name, curve in curves.items()}}
                for host, (sizes, curves) in sorted(self._hosts.items())
            ],
        }


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """Returns at most ``limit`` (4 or more) of the points, in their order: the first, the last, extremes between.

    Each stretch of the curve keeps its lowest and its highest point, so that no spike is lost; one without a finite
    value keeps its gap.
    """
    if len(points) <= limit:
        return list(points)
    kept, stretches = [points[0]], (limit - 2) // 2
    bounds = [1 + index * (len(points) - 2) // stretches for index in range(stretches + 1)]
    for first, behind in itertools.pairwise(bounds):
        finite = [point for point in points[first:behind] if math.isfinite(point[2])] or points[first : first + 1]
        # Both are points of the stretch, so their order in time is that of their steps' places.
        kept += sorted({choose(finite, key=lambda point: point[2]) for choose in (min, max)})
    return [*kept, points[-1]]


class Curve:
    """A curve that grows, and never takes more memory than twice its limit of points."""

    def __init__(self, limit: int = MAX_POINTS) -> None:
        self._limit = limit
        self._points: list[Point] = []

    def add(self, point: Point) -> None:
        """Adds the newest point; of the older ones at most the limit stay."""
        self._points.append(point)
        if len(self._points) > 2 * self._limit:
            self._points = thin(self._points, self._limit)

    def columns(self) -> dict[str, list[Any]]:
        """Returns times, steps and values of the points; the value of a gap is None."""
        times, steps, values = zip(*thin(self._points, self._limit), strict=True)
        # Six digits, and all those of an integer.
        shown = [value if not value % 1 else float(f"{value:.6g}") if value % 1 > 0 else None for value in values]
        return {"t": [round(when, 3) for when in times], "s": list(steps), "v": shown}


def usage(job: Job, status: RunStatus, now: float) -> str:
    """Returns what the last submission has used until a Unix time, such as ``3.2 GPU-hours, about 7.97 EUR``.

    Each rank counts from the first start until the end, restarts included; one without ``cpus_per_process`` counts as
    one core. Returns an empty text before the ranks had started.
    """
    if status.started is None:
        return ""
    # A driver that has died is known to have lived until its last heartbeat.
    until = (status.ended or status.heartbeat) if status.final else now
    seconds = (status.world_size or job.num_processes) * max(0.0, until - status.started)
    hours = seconds / 3600 * (1 if job.use_gpu else job.cpus_per_process or 1)
    price = job.prices.get("gpu" if job.use_gpu else "core")
    cost = f", about {hours * price:.3g} {job.prices.get('currency', '')}".rstrip() if is_number(price) else ""
    return f"{hours:.3g} {'GPU' if job.use_gpu else 'core'}-hours{cost}"


def prices_from_environment() -> dict[str, Any]:
    """Returns the prices of an hour in ``RANKZERO_PRICES``, such as ``gpu=2.49,core=0.04,currency=EUR``.

    Raises InvalidJobError for other text.
    """
    prices: dict[str, Any] = {}
    for pair in filter(None, map(str.strip, os.environ.get("RANKZERO_PRICES", "").split(","))):
        name, _, value = (part.strip() for part in pair.partition("="))
        with contextlib.suppress(ValueError):
            prices[name] = value if name == "currency" else float(value)
        is_price = name in ("gpu", "core") and is_number(prices.get(name)) and prices[name] >= 0
        if not (is_price or (name == "currency" and value)):
            raise InvalidJobError(f"RANKZERO_PRICES has {pair!r}; write it like gpu=2.49,core=0.04,currency=EUR")
    return prices
