"""Which points of a recorded scenario are tried. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence

Point = tuple[str, str]
"""The name of an operation, and ``"before"`` or ``"after"``; or that of a request, and one of `ANSWERS`."""

ANSWERS = ("late", "403", "503", "500", "never")
"""Wrong answers of a store: later than its client waits, refused, busy, an error although it was done, or none."""


_READS = re.compile(r" send (GET|HEAD) ")


def points_of(names: Sequence[str]) -> list[Point]:
    """Returns the point before the first operation of each role, and the one after each operation.

    Between two operations of a process its files and peers are in one state, so one point stands for both sides. A
    request that only reads leaves that state as it is, and adds no point.
    """
    roles: set[str] = set()
    points = []
    for name in names:
        if _READS.search(name):
            continue
        if (role := name.split()[0]) not in roles:
            roles.add(role)
            points.append((name, "before"))
        points.append((name, "after"))
    return points


def answers_of(names: Sequence[str]) -> list[Point]:
    """Returns each request to an object store with each wrong answer."""
    requests = [name for name in names if re.search(r" send (GET|PUT|POST|DELETE|HEAD) ", name)]
    return [(name, answer) for name in requests for answer in ANSWERS]


def spread(points: Sequence[Point], count: int) -> list[Point]:
    """Returns so many points at equal distances."""
    return [points[(2 * number + 1) * len(points) // (2 * count)] for number in range(min(count, len(points)))]
