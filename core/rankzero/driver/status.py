"""`StatusWriter`: the one thread that writes a submission's status, with a heartbeat, however long the store takes."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import Any

from rankzero.bounds import HEARTBEAT_INTERVAL
from rankzero.errors import RunNotFoundError
from rankzero.run.directory import RunDirectory, RunStatus

logger = logging.getLogger(__name__)

_FINAL_INTERVAL = 0.25
"""Seconds between two tries to write a final status."""


class StatusWriter:
    """Holds the status, and writes it when it has changed and with every heartbeat.

    Nobody waits for a write who does not ask to, so neither a slow store nor a large result on its way there makes a
    live driver look dead, or deaf. One write follows the other: none overtakes a later one. What the store refuses is
    tried again with the next heartbeat.
    """

    def __init__(self, run: RunDirectory, status: RunStatus) -> None:
        """Nothing is written before the first `change`."""
        self._run = run
        self._changed = threading.Condition()
        self._wanted = self._tried = self._written = 0
        self._thread = threading.Thread(target=self._work, name="rankzero-heartbeat", daemon=True)
        self.status = status
        self.superseded = False
        """Another submission took this run over: this driver has lost the right to write."""
        self.problem: Exception | None = None
        """Why the last write failed."""

    def note(self, **changes: Any) -> None:
        """Changes the status; the next heartbeat writes it."""
        with self._changed:
            self.status = replace(self.status, **changes)

    def change(self, **changes: Any) -> None:
        """Changes the status, and has it written now. A final one is the last."""
        with self._changed:
            self.status = replace(self.status, **changes)
            self._wanted += 1
            self._changed.notify_all()
        if not self._thread.ident:
            self._thread.start()

    def await_written(self, timeout: float) -> bool:
        """True as soon as every change until now is written, or need not be any more; False if the time is up."""
        with self._changed:
            wanted = self._wanted
            return self._changed.wait_for(lambda: self._written >= wanted, timeout)

    def _work(self) -> None:
        next_beat = time.monotonic() + HEARTBEAT_INTERVAL
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted > self._tried, max(0.0, next_beat - time.monotonic()))
                self._tried = wanted = self._wanted
                status = self.status = replace(self.status, heartbeat=time.time())
            try:
                if status.final or time.monotonic() >= next_beat:
                    self._check_superseded()
                if not self.superseded:
                    self._run.write_status(status)
            except Exception as error:
                # Drivers of object stores have exceptions of their own.
                if self.problem is None:
                    logger.warning("the status could not be written; trying again", exc_info=True)
                self.problem = error
                next_beat = time.monotonic() + (_FINAL_INTERVAL if status.final else HEARTBEAT_INTERVAL)
                continue
            self.problem = None
            next_beat = time.monotonic() + HEARTBEAT_INTERVAL
            with self._changed:
                self._written = wanted
                self._changed.notify_all()
            if status.final:
                return

    def _check_superseded(self) -> None:
        """A driver that was held up for so long that others declared it dead must not write over its heir."""
        try:
            self.superseded = self._run.job().submission != self.status.submission
        except RunNotFoundError:
            self.superseded = True
