"""Which points of a recorded scenario are tried. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

Point = tuple[str, str]
"""The name of an operation, and ``"before"`` or ``"after"``."""


def points_of(names: Sequence[str]) -> list[Point]:
    """Returns the point before the first operation of each role, and the one after each operation.

    Between two operations of a process its files and peers are in one state, so one point stands for both sides.
    """
    roles: set[str] = set()
    points = []
    for name in names:
        if (role := name.split()[0]) not in roles:
            roles.add(role)
            points.append((name, "before"))
        points.append((name, "after"))
    return points


def spread(points: Sequence[Point], count: int) -> list[Point]:
    """Returns so many points at equal distances."""
    return [points[(2 * number + 1) * len(points) // (2 * count)] for number in range(min(count, len(points)))]
