"""Curves with few points that look like those with many. Pure."""

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


def _value(point: Point) -> float:
    return point[2]
