"""The interval between writes, and between polls, of a run directory on an object store, which charges requests."""

from __future__ import annotations

from rankzero import bounds

_SHARE = 0.01


def pace(age: float) -> float:
    """Returns the seconds between two writes of a driver, or two polls of a follower: 1 % of the run's duration so far.

    Followers are late by at most 1 % of the run, and a run of one day costs 9,000 polls instead of 86,400.

    Args:
        age: Seconds since the driver started.

    Example:
        >>> pace(20), pace(300), pace(86400)
        (1.0, 3.0, 10.0)
    """
    return min(max(age * _SHARE, bounds.SHORTEST_PACE), bounds.LONGEST_PACE)
