"""`Trackers`: calls the trackers of a run, each in a thread of its own, so that none can delay the run."""

from __future__ import annotations

import base64
import contextlib
import itertools
import logging
import os
import pickle
import threading
import time
from collections.abc import Mapping
from typing import Any

from rankzero import bounds
from rankzero.job import Job
from rankzero.masking import Mask, secrets_of, without_credentials
from rankzero.run import growing
from rankzero.run.directory import RunDirectory
from rankzero.run.growing import Position
from rankzero.run.handle import RunHandle
from rankzero.run.names import EVENTS
from rankzero.run.reports import OfTraining
from rankzero.tracking.tracker import Tracker

TRACKER_POLL_INTERVAL = 1.0  # Seconds before each poll of the events, the first too: imports slow the ranks' start
TRACKER_PAUSE_MAX = bounds.scaled(60.0)  # Most seconds until a tracker that keeps failing is called again
logger = logging.getLogger(__name__)


class Trackers:
    """The trackers of one submission, while this process drives it."""

    def __init__(self, run: RunDirectory, job: Job, packed: Mapping[str, Any] | None) -> None:
        """Notes the current end of the events: trackers get later ones. Starts no thread.

        Args:
            run: The run.
            job: The job of the submission.
            packed: The result of `rankzero.submit.trackers.pack`; None for no trackers.
        """
        self._ended = threading.Event()
        self._feeds = []
        if packed:
            since: Position | None = None
            # An error of a tracker must not end the run. Then events count from when the store can be read.
            with contextlib.suppress(Exception):
                since = growing.end_of(run.path(EVENTS))
            self._feeds = [_Feed(run, pickled, job, since, self._ended) for pickled in packed["pickles"]]

    def start(self) -> None:
        """Starts the threads that call the trackers, if they do not run yet."""
        for feed in self._feeds:
            if not feed.ident:
                feed.start()

    def end(self) -> None:
        """Has each tracker called for the last time, since the run has ended. Does not wait."""
        self._ended.set()
        self.start()

    def close(self) -> None:
        """Calls each tracker for the last time, and waits for that, at most `TRACKERS_TIMEOUT` seconds."""
        self.end()
        deadline = time.monotonic() + bounds.TRACKERS_TIMEOUT()
        for feed in self._feeds:
            feed.join(max(0.0, deadline - time.monotonic()))
            if feed.is_alive():
                logger.warning("%s has not taken the end of the run within %g s", feed.what, bounds.TRACKERS_TIMEOUT())


class _Feed(threading.Thread):
    """The thread that calls one tracker."""

    def __init__(
        self, run: RunDirectory, pickled: str, job: Job, since: Position | None, ended: threading.Event
    ) -> None:
        super().__init__(name="rankzero-tracker", daemon=True)
        self._run_directory = run
        self._handle: RunHandle[Any] = RunHandle(run.directory, follows=False)
        self._submission = job.submission
        self._is_followed = False
        """True once an event of a later submission was read."""
        self._is_of_training = OfTraining(job.fresh_since)
        self._pickled = pickled
        self._position = since
        self._ended = ended
        self._tracker: Tracker | None = None
        self._has_begun = False
        self._failures = 0
        self.what = "a tracker"

    def run(self) -> None:
        """Polls the events until the run has ended, and then once more."""
        pause, has_ended = TRACKER_POLL_INTERVAL, False
        while not has_ended:
            has_ended = self._ended.wait(max(pause, self._handle.pace))
            try:
                self._poll()
                pause = TRACKER_POLL_INTERVAL
            except Exception as error:
                self._note(error)
                pause = min(2 * pause, TRACKER_PAUSE_MAX())
        if self._tracker and self._has_begun:
            try:
                self._tracker.end(self._handle, self._handle.status())
            except Exception as error:
                self._note(error)
        if self._failures > 1:
            logger.warning("%s has failed %d times", self.what, self._failures)

    def _poll(self) -> None:
        """Passes new events on to the tracker. Raises the tracker's exceptions."""
        tracker = self._tracker = self._tracker or self._load()
        if self._position is None:
            self._position = growing.end_of(self._run_directory.path(EVENTS))
            # From here on, events of any attempt are new.
            self._is_of_training = OfTraining(0)
        if not self._has_begun:
            tracker.begin(self._handle)
            self._has_begun = True
        status = self._handle.status()
        # The status of a later submission has other positions, or none yet.
        is_current = status.submission == self._submission and not status.final
        while not self._is_followed:
            before = self._position
            events, after = self._handle.output.read_events(before, status if is_current else None)
            own = list(itertools.takewhile(self._is_own, events))
            reached = after, len(own) < len(events)
            if not tracker.is_idempotent:
                self._position, self._is_followed = reached
            tracker.add(self._handle, [event for event in own if self._is_of_training(event)])
            self._position, self._is_followed = reached
            if after == before:
                return

    def _is_own(self, event: Mapping[str, Any]) -> bool:
        """Returns False for the first event of a later submission, whose driver has trackers of its own."""
        return not (event.get("type") == "state" and event.get("submission", 0) > self._submission)

    def _load(self) -> Tracker:
        tracker: Tracker = pickle.loads(base64.b64decode(self._pickled))
        self.what = type(tracker).__name__
        if tracker.is_idempotent:
            self._position = Position()
        return tracker

    def _note(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1:
            # The error of a library may contain an address with a password, which it found in the environment.
            mask = Mask(secrets_of(vars(self._tracker) if self._tracker else {}) + secrets_of(os.environ))
            text = without_credentials(mask.text(f"{type(error).__name__}: {error}"))
            logger.warning("%s misses events of the run: %s", self.what, text)
