"""How often a run directory on an object store is written and looked at, where each time is a request."""

from __future__ import annotations

SHORTEST_PACE = 1.0
"""Seconds."""

LONGEST_PACE = 10.0
"""Seconds; so long may a request to cancel a run wait that has gone on for a quarter of an hour."""

_SHARE = 0.01


def pace(age: float) -> float:
    """Seconds between two writes by a driver, and between two looks of whoever follows: a hundredth of the run so far.

    A follower learns late of what happens by 1 % of the run, and a day costs 9,000 looks instead of 86,400.

    Args:
        age: Seconds for which the driver has been at it.

    Example:
        >>> pace(20), pace(300), pace(86400)
        (1.0, 3.0, 10.0)
    """
    return min(max(age * _SHARE, SHORTEST_PACE), LONGEST_PACE)
