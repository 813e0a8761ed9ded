"""Is the driver of a run alive? Decided by its heartbeat, where nobody can ask for its process."""

from __future__ import annotations

from rankzero.bounds import CLOCK_SKEW, DRIVER_DEAD_AFTER


def driver_is_dead(heartbeat: float, now: float, unchanged: float) -> bool:
    """True if a driver on another host has stopped.

    Args:
        heartbeat: Unix time of the last heartbeat, by the driver's clock.
        now: Unix time by the reader's clock, which may differ by `CLOCK_SKEW`.
        unchanged: Seconds for which the reader has seen this very heartbeat.
    """
    return unchanged > DRIVER_DEAD_AFTER or now - heartbeat > DRIVER_DEAD_AFTER + CLOCK_SKEW
