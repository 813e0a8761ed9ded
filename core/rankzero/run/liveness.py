"""Decides whether the driver of a run is alive: by its process if that can be queried, else by its heartbeat."""

from __future__ import annotations

import time

from rankzero.bounds import CLOCK_SKEW, DRIVER_DEAD_AFTER, DRIVER_STALE_AFTER
from rankzero.host.processes import STOPPED, process_namespace, process_state, thread_lives
from rankzero.run.directory import RunStatus


class HeartbeatWatch:
    """Watches a driver's heartbeat for one reader, with a monotonic clock, which stops while the machine sleeps."""

    def __init__(self) -> None:
        self._last = self._last_seen = self._blind_until = 0.0

    def note_blindness(self) -> None:
        """Records that the status could not be read until now, so that this time does not count against the driver."""
        self._blind_until = time.monotonic()

    def is_silent(self, status: RunStatus) -> bool:
        """Returns True if the heartbeat has not changed for so long that its driver counts as dead.

        The wall clock advances while a laptop or a VM sleeps, and a driver there does not. It is therefore used only
        for the first status, and only if the driver's process is not visible.

        Args:
            status: The status, just read.
        """
        is_first = not self._last_seen
        if status.heartbeat != self._last:
            self._last, self._last_seen = status.heartbeat, time.monotonic()
        unchanged = time.monotonic() - max(self._last_seen, self._blind_until)
        age = time.time() - status.heartbeat if is_first and not _process_state(status) else 0.0
        return driver_is_dead(age, unchanged, dead_after(status))


def process_lives(status: RunStatus) -> bool | None:
    """Returns whether the driver lives; None if its process cannot be queried and only the heartbeat decides.

    A process that exists is alive even if the store rejects its heartbeats. The driver may be a thread of a process
    that outlives it, such as a notebook, so the kernel is queried for the thread.
    """
    if status.driver_pid is None or status.driver_namespace != process_namespace():
        return None
    state = _process_state(status)
    if state is None:
        return False
    if status.driver_thread is None:
        # A stopped driver is left to its heartbeat. When that is too old, its agents have ended as well.
        return None if state in STOPPED else True
    lives = thread_lives(status.driver_pid, status.driver_thread)
    is_stale = time.time() - status.heartbeat > DRIVER_STALE_AFTER
    return None if lives is None and is_stale else lives is not False


def _process_state(status: RunStatus) -> str | None:
    """Returns the state of the driver's process; None if it has exited or is on another machine."""
    if status.driver_pid is None or status.driver_namespace != process_namespace():
        return None
    return process_state(status.driver_pid, status.driver_start)


_MISSED = 3
"""Number of heartbeats that a driver may miss."""


def dead_after(status: RunStatus) -> float:
    """Returns the seconds without a heartbeat after which the driver that wrote a status counts as dead.

    A driver that a cluster has not started yet has `RunStatus.patience` seconds until its first heartbeat.
    """
    return max(DRIVER_DEAD_AFTER, _MISSED * status.interval, status.patience)


def driver_is_dead(age: float, unchanged: float, bound: float) -> bool:
    """Returns True if a driver on another host counts as dead.

    Args:
        age: Seconds since the last heartbeat, by the clocks of two hosts, which may differ by `CLOCK_SKEW`.
        unchanged: Seconds for which the reader has read the same heartbeat.
        bound: Seconds without a heartbeat after which a driver counts as dead.
    """
    return unchanged > bound or age > bound + CLOCK_SKEW
