"""`Renewal` renews the lease of a run for a follower."""

from __future__ import annotations

import contextlib
import time

from rankzero.run.directory import RunDirectory

INTERVAL = 10.0
"""Longest time in seconds between two renewals of a followed run's lease."""

INTERVAL_REMOTE = 60.0
"""Longest time in seconds between two renewals on an object store, where each renewal is a request."""


def interval_of(run: RunDirectory, bound: float) -> float:
    """Returns the seconds between two renewals of a run that ends after ``bound`` seconds without a renewal."""
    return min(INTERVAL_REMOTE if run.is_remote else INTERVAL, bound / 4)


class Renewal:
    """Reports to a run's driver that the run is followed."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._bound: float | None = None
        self._interval: float | None = None
        self._renewed = 0.0

    def renew(self) -> None:
        """Renews the lease now. Raises OSError if the store cannot be written."""
        self._run.renew_lease(self._bound)

    def hold(self, bound: float) -> None:
        """Makes the run end after ``bound`` seconds without a renewal, and renews the lease. Raises like `renew`."""
        self._bound, self._interval = bound, self._interval_of(bound)
        self.renew()

    def renew_if_due(self) -> None:
        """Renews the lease if the run has an ``orphan_timeout`` and the interval has passed."""
        if self._interval is None:
            bound = self._run.job().orphan_timeout
            self._interval = 0.0 if bound is None else self._interval_of(bound)
        if self._interval and time.monotonic() - self._renewed > self._interval:
            self._renewed = time.monotonic()
            # A lease that cannot be renewed must not end the follower.
            with contextlib.suppress(Exception):
                self.renew()

    def _interval_of(self, bound: float) -> float:
        return interval_of(self._run, bound)
