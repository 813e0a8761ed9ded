"""`Trackers`: calls the trackers of a run, each in a thread of its own, so that none can delay the run."""

from __future__ import annotations

import base64
import logging
import os
import pickle
import threading
import time
from collections.abc import Mapping
from typing import Any

from rankzero import bounds
from rankzero.masking import Mask, secrets_of, without_credentials
from rankzero.run.directory import Submission
from rankzero.run.handle import RunHandle
from rankzero.run.names import EVENTS
from rankzero.run.output import events_of
from rankzero.tracking.tracker import Tracker

TRACKER_POLL_INTERVAL = 1.0  # Seconds before each poll of the events, the first too: imports slow the ranks' start
TRACKER_PAUSE_MAX = bounds.scaled(60.0)  # Most seconds until a tracker that keeps failing is called again
logger = logging.getLogger(__name__)


class Trackers:
    """The trackers of one submission, while this process drives it; false if there are none."""

    def __init__(self, own: Submission, packed: Mapping[str, Any] | None) -> None:
        """Prepares the threads, and starts none. `rankzero.submit.pack.pack_trackers` has packed the trackers."""
        self._ended = threading.Event()
        self._feeds = [_Feed(own, pickled, self._ended) for pickled in (packed or {}).get("pickles", ())]

    def __bool__(self) -> bool:
        return bool(self._feeds)

    def start(self) -> None:
        """Starts the threads that call the trackers."""
        for feed in self._feeds:
            feed.start()

    def end(self) -> None:
        """Has each tracker called for the last time, since the run has ended. Does not wait."""
        self._ended.set()

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

    def __init__(self, own: Submission, pickled: str, ended: threading.Event) -> None:
        super().__init__(name="rankzero-tracker", daemon=True)
        self._handle: RunHandle[Any] = RunHandle(own.run.directory, job=own.job, follows=False)
        self._pickled = pickled
        self._stream = self._handle.stream(EVENTS, earlier=False)
        self._ended = ended
        self._tracker: Tracker | None = None
        self._has_begun = False
        self.what = "a tracker"

    def run(self) -> None:
        """Polls the events until the run has ended, and then once more."""
        pause, has_ended, has_warned = TRACKER_POLL_INTERVAL, False, False
        while not has_ended:
            has_ended = self._ended.wait(max(pause, self._handle.pace))
            try:
                self._poll()
                if has_ended and self._tracker:
                    self._tracker.end(self._handle, self._handle.status())
                pause = TRACKER_POLL_INTERVAL
            except Exception as error:
                pause = min(2 * pause, TRACKER_PAUSE_MAX())
                if not has_warned:
                    # The error of a library may contain an address with a password, which it found in the environment.
                    mask = Mask(secrets_of(vars(self._tracker) if self._tracker else {}) + secrets_of(os.environ))
                    text = without_credentials(mask.text(f"{type(error).__name__}: {error}"))
                    logger.warning("%s misses events of the run: %s", self.what, text)
                has_warned = True

    def _poll(self) -> None:
        """Passes new events on to the tracker. Raises the tracker's exceptions."""
        tracker = self._tracker
        if tracker is None:
            tracker = self._tracker = pickle.loads(base64.b64decode(self._pickled))
            self.what = type(tracker).__name__
            if tracker.is_idempotent:
                self._stream = self._handle.stream(EVENTS)
        if not self._has_begun:
            tracker.begin(self._handle)
            self._has_begun = True
        status = self._handle.status()
        end = None if status.final else self._stream.end(status)
        while True:
            before, lines, after = self._stream.position, self._stream.read(end), self._stream.position
            self._stream.position = before if tracker.is_idempotent else after
            tracker.add(self._handle, list(events_of(lines)))
            self._stream.position = after
            if not lines:
                return
