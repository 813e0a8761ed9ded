"""Computes the lease of a run: the time for which it continues without a follower until the next try of its step."""

from __future__ import annotations

import math

SCHEDULING_SLACK = 900.0
"""Seconds between the time at which a try is due and its first poll of the run: a pool may be full, a run may wait in a
queue, a deployment may be slow."""

DETACHED_LEASE = 1800.0
"""Shortest lease in seconds of a run that a service follows for its step, such as a triggerer, which may restart."""

LAST_LEASE = 60.0
"""Seconds for which a run outlives the last try that attached to it. Longer than a short outage of a store."""

LONGEST_DELAY = 24 * 3600.0
"""Longest delay in seconds between two tries, if the delay grows."""


def longest_delay(base: float, growth: float, bound: float = LONGEST_DELAY) -> float:
    """Returns the longest delay between two tries in seconds.

    Args:
        base: Seconds before the first retry.
        growth: Factor by which the last delay is longer; may be infinite.
        bound: Longest delay in seconds, if the delay grows.

    Example:
        >>> longest_delay(600, 4)
        2400.0
    """
    return float(base if growth <= 1 else max(base, min(base * growth, bound) if base else 0.0))


def lease(delay: float, *, unnoticed: float = 0.0, least: float = SCHEDULING_SLACK) -> float:
    """Returns the seconds for which a run continues without a follower.

    Args:
        delay: The longest delay before the next try, in seconds.
        unnoticed: Seconds until the orchestrator notices that a try has died.
        least: Shortest lease to return, in seconds.
    """
    return max(least, unnoticed + delay + SCHEDULING_SLACK)


def power(base: float, exponent: int) -> float:
    """Returns ``base ** exponent``, or infinity if that is too large for a float."""
    try:
        return float(base) ** exponent
    except OverflowError:
        return math.inf
