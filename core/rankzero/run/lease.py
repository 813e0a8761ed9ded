"""The lease of a run: the time for which it continues without a follower until the next try of its step."""

from __future__ import annotations

import math

from rankzero import bounds
from rankzero.run.directory import Submission

RETRY_DELAY_MAX = 24 * 3600.0  # Longest delay in seconds between two tries, if the delay grows
RENEWAL_INTERVAL = 10.0  # Most seconds between two renewals of a lease on a disk
RENEWAL_INTERVAL_REMOTE = 60.0  # The same on an object store, where each is a request
SCHEDULING_SLACK = 900.0  # Seconds from when a try is due to its first poll: a pool may be full, a deployment slow
DETACHED_LEASE = 1800.0  # Shortest lease of a run that a service follows, such as a triggerer, which may restart
LAST_LEASE = bounds.scaled(60.0)  # For which a run outlives its last try: longer than a short outage of a store
QUERY_INTERVAL = bounds.scaled(60.0)  # Between two queries whether the orchestrator's run of a training has ended


def longest_delay(base: float, growth: float, bound: float = RETRY_DELAY_MAX) -> float:
    """Returns the longest delay between two tries, which grow from ``base`` by a factor, up to a bound, in seconds."""
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


def interval_of(own: Submission, bound: float) -> float:
    """Returns the seconds between two renewals of a run that ends after ``bound`` seconds without a renewal."""
    return min(RENEWAL_INTERVAL_REMOTE if own.is_remote else RENEWAL_INTERVAL, bound / 4)
