"""Is the driver of a run alive? Decided by its heartbeat, where nobody can ask for its process."""

from __future__ import annotations

from rankzero.bounds import CLOCK_SKEW, DRIVER_DEAD_AFTER


def dead_after(interval: float) -> float:
    """Seconds without a heartbeat after which a driver counts as dead that writes one every so many seconds."""
    return max(DRIVER_DEAD_AFTER, 3 * interval)


def driver_is_dead(age: float, unchanged: float, interval: float) -> bool:
    """True if a driver on another host has stopped.

    Args:
        age: Seconds since the last heartbeat, by the clocks of two hosts, which may differ by `CLOCK_SKEW`.
        unchanged: Seconds for which the reader has seen this very heartbeat.
        interval: Seconds between two heartbeats, as the driver says.
    """
    return unchanged > dead_after(interval) or age > dead_after(interval) + CLOCK_SKEW
