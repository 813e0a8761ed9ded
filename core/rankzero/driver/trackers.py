"""`Trackers`: calls a run's trackers, each in a thread, without being in the run's way."""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import pickle
import threading
import time
from collections.abc import Mapping
from typing import Any

from rankzero.masking import Mask, secrets_of, without_credentials
from rankzero.run import growing, pieces
from rankzero.run.directory import EVENTS, RunDirectory
from rankzero.run.growing import Position
from rankzero.run.handle import RunHandle
from rankzero.run.reports import OfTraining
from rankzero.tracking.tracker import Tracker

logger = logging.getLogger(__name__)

INTERVAL = 1.0
"""Seconds between two looks at the events; on an object store as its readers pace themselves. Not at once: what a
tracker imports shall not compete with the start of the ranks."""

LONGEST_PAUSE = 60.0
"""Seconds after which a tracker that keeps failing is called again, at most: the pause doubles."""

FLUSH_TIMEOUT = 10.0
"""Seconds that trackers have after the end of a run, all together."""


class Trackers:
    """The trackers of one submission, as long as this process drives it."""

    def __init__(self, run: RunDirectory, fresh_since: int, packed: Mapping[str, Any] | None) -> None:
        """Starts nothing. Events count from here on; where the store does not say how far they go, from when it does.

        Args:
            run: The run.
            fresh_since: `Job.fresh_since`.
            packed: What `rankzero.submit.trackers.pack` has made; None for no trackers.
        """
        self._ended = threading.Event()
        self._feeds = []
        if packed:
            since: Position | None = None
            # No run ends because of its trackers.
            with contextlib.suppress(Exception):
                since = _end_of_events(run)
            self._feeds = [_Feed(run, pickled, fresh_since, since, self._ended) for pickled in packed["pickles"]]

    def start(self) -> None:
        """Begins to call them, if it has not yet."""
        for feed in self._feeds:
            if not feed.ident:
                feed.start()

    def end(self) -> None:
        """The run has ended: they are called for the last time. Waits for nothing."""
        self._ended.set()
        self.start()

    def close(self) -> None:
        """Ends them, and waits for that, `FLUSH_TIMEOUT` seconds at most."""
        self.end()
        deadline = time.monotonic() + FLUSH_TIMEOUT
        for feed in self._feeds:
            feed.join(max(0.0, deadline - time.monotonic()))
            if feed.is_alive():
                logger.warning("%s has not taken the end of the run within %g s", feed.what, FLUSH_TIMEOUT)


class _Feed(threading.Thread):
    """One tracker."""

    def __init__(
        self, run: RunDirectory, pickled: str, fresh_since: int, since: Position | None, ended: threading.Event
    ) -> None:
        super().__init__(name="rankzero-tracker", daemon=True)
        self._run_directory = run
        self._handle: RunHandle[Any] = RunHandle(run.directory, follows=False)
        self._is_ours = OfTraining(fresh_since)
        self._pickled = pickled
        self._position = since
        self._ended = ended
        self._tracker: Tracker | None = None
        self._has_begun = False
        self._failures = 0
        self.what = "a tracker"

    def run(self) -> None:
        """Looks until the run has ended, and then once more."""
        pause, has_ended = INTERVAL, False
        while not has_ended:
            has_ended = self._ended.wait(max(pause, self._handle.pace))
            try:
                self._look()
                pause = INTERVAL
            except Exception as error:
                self._note(error)
                pause = min(2 * pause, LONGEST_PAUSE)
        if self._tracker and self._has_begun:
            try:
                self._tracker.end(self._handle, self._handle.status())
            except Exception as error:
                self._note(error)
        if self._failures > 1:
            logger.warning("%s has failed %d times", self.what, self._failures)

    def _look(self) -> None:
        """Passes on what is new. Raises what the tracker raises."""
        tracker = self._tracker = self._tracker or self._load()
        if self._position is None:
            self._position = _end_of_events(self._run_directory)
            # Whatever comes now.
            self._is_ours = OfTraining(0)
        if not self._has_begun:
            tracker.begin(self._handle)
            self._has_begun = True
        status = self._handle.status()
        while True:
            before = self._position
            events, after = self._handle.read_events(before, None if status.final else status)
            if not tracker.is_idempotent:
                self._position = after
            tracker.add(self._handle, [event for event in events if self._is_ours(event)])
            self._position = after
            if after == before:
                return

    def _load(self) -> Tracker:
        tracker: Tracker = pickle.loads(base64.b64decode(self._pickled))
        self.what = type(tracker).__name__
        if tracker.is_idempotent:
            self._position = Position()
        return tracker

    def _note(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1:
            # A library may have found its address in the environment, and name it.
            mask = Mask(secrets_of(vars(self._tracker) if self._tracker else {}) + secrets_of(os.environ))
            text = without_credentials(mask.text(f"{type(error).__name__}: {error}"))
            logger.warning("%s misses what happens in the run: %s", self.what, text)


def _end_of_events(run: RunDirectory) -> Position:
    path = run.path(EVENTS)
    return pieces.end_of(path) if run.is_remote else growing.end_of(path)
