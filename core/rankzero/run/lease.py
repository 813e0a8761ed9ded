"""How long a run waits for the next try of the pipeline step that follows it: bounds, and the growth of delays."""

from __future__ import annotations

import math

SCHEDULING_SLACK = 900.0
"""Seconds between the moment at which a try is due and its first look at the run: a pool may be full, a run may wait
in a queue, a deployment may take its time."""

DETACHED_LEASE = 1800.0
"""Least lease of a run that another service follows for its step, such as a triggerer that may be restarted."""

LAST_LEASE = 60.0
"""Seconds for which a run that the last try has attached to outlives that. Longer than a store is away for a moment."""

LONGEST_DELAY = 24 * 3600.0
"""Seconds; bound of a delay between tries that grows."""


def longest_delay(base: float, growth: float, bound: float = LONGEST_DELAY) -> float:
    """The longest delay between two tries.

    Args:
        base: Seconds before the first retry.
        growth: By how much the last one is longer; may be infinite.
        bound: Seconds that a growing delay does not exceed.

    Example:
        >>> longest_delay(600, 4)
        2400.0
    """
    return float(base if growth <= 1 else max(base, min(base * growth, bound) if base else 0.0))


def lease(delay: float, *, unnoticed: float = 0.0, least: float = SCHEDULING_SLACK) -> float:
    """Seconds for which a run may go on without a follower.

    Args:
        delay: The longest delay before the next try.
        unnoticed: Seconds until the orchestrator notices that a try has died.
        least: Not less than this.
    """
    return max(least, unnoticed + delay + SCHEDULING_SLACK)


def power(base: float, exponent: int) -> float:
    """``base ** exponent``, infinite where that is too large for a float."""
    try:
        return float(base) ** exponent
    except OverflowError:
        return math.inf
