"""Curves with few points that look like those with many."""

from __future__ import annotations

from collections.abc import Sequence

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
        shown = [float(f"{value:.6g}") for value in values]
        return {"t": [round(when, 3) for when in times], "s": list(steps), "v": shown}


def _value(point: Point) -> float:
    return point[2]
