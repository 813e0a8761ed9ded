"""Whether the driver of a run is alive. The heartbeat decides only where its process cannot be queried."""

from __future__ import annotations

import time

from rankzero.bounds import CLOCK_SKEW, DRIVER_DEAD_AFTER, DRIVER_STALE_AFTER
from rankzero.host.processes import STOPPED, process_namespace, process_state, thread_lives
from rankzero.run.directory import RunStatus


class HeartbeatWatch:
    """What one reader has seen of a driver's heartbeat, by its own clock, which stands still while a machine sleeps."""

    def __init__(self) -> None:
        self._last = self._last_seen = self._blind_until = 0.0

    def note_blindness(self) -> None:
        """The status could not be read until now: a heartbeat that nobody can read does not stand still."""
        self._blind_until = time.monotonic()

    def is_silent(self, status: RunStatus) -> bool:
        """True if the heartbeat has stood still for so long that its driver counts as dead.

        The clock of the wall goes on while a laptop or a VM sleeps, and a driver there does not: who has watched its
        heartbeat, or sees its process, does not ask that clock.

        Args:
            status: As it was read just now.
        """
        is_first = not self._last_seen
        if status.heartbeat != self._last:
            self._last, self._last_seen = status.heartbeat, time.monotonic()
        unchanged = time.monotonic() - max(self._last_seen, self._blind_until)
        age = time.time() - status.heartbeat if is_first and not _process_state(status) else 0.0
        return driver_is_dead(age, unchanged, dead_after(status))


def process_lives(status: RunStatus) -> bool | None:
    """True or False if the driver's process can be queried; None where only the heartbeat can decide.

    A heartbeat that the store does not take says nothing of a process that is there. The driver may be a thread of a
    process that lives on without it, such as a notebook, so the kernel is queried for the thread.
    """
    if status.driver_pid is None or status.driver_namespace != process_namespace():
        return None
    state = _process_state(status)
    if state is None:
        return False
    if status.driver_thread is None:
        # Its agents have given it up by the time that counts.
        return None if state in STOPPED else True
    lives = thread_lives(status.driver_pid, status.driver_thread)
    is_stale = time.time() - status.heartbeat > DRIVER_STALE_AFTER
    return None if lives is None and is_stale else lives is not False


def _process_state(status: RunStatus) -> str | None:
    """The state of the driver's process; None if it is gone, or not one of this machine."""
    if status.driver_pid is None or status.driver_namespace != process_namespace():
        return None
    return process_state(status.driver_pid, status.driver_start)


_MISSED = 3
"""Heartbeats that a driver may miss."""


def dead_after(status: RunStatus) -> float:
    """Seconds without a heartbeat after which the driver counts as dead that wrote this status.

    A driver that a cluster has not started yet is given `RunStatus.patience` for its first one.
    """
    return max(DRIVER_DEAD_AFTER, _MISSED * status.interval, status.patience)


def driver_is_dead(age: float, unchanged: float, bound: float) -> bool:
    """True if a driver on another host has stopped.

    Args:
        age: Seconds since the last heartbeat, by the clocks of two hosts, which may differ by `CLOCK_SKEW`.
        unchanged: Seconds for which the reader has seen this very heartbeat.
        bound: Seconds without a heartbeat that are too many.
    """
    return unchanged > bound or age > bound + CLOCK_SKEW
