"""`Reporter`: keeps the run's report.html, while the run lives and when it has ended."""

from __future__ import annotations

import contextlib
import logging
import threading
import time

from rankzero import store
from rankzero.report import facts, page
from rankzero.run.directory import RunDirectory
from rankzero.run.handle import RunHandle

logger = logging.getLogger(__name__)

REFRESH_INTERVAL = 30.0
"""Shortest time in seconds between two reports of a run that lives."""

COST_SHARE = 500
"""A report is made again at the earliest after so many times the seconds that making it took: 0.2 % of a core."""

END_TIMEOUT = 10.0
"""Seconds for the last report. A run that has ended waits no longer for it, and has none rather than an old one."""


class Reporter:
    """A thread that writes the report. What goes wrong there is a line in the log, and never the run's trouble.

    A run in an object store has its report when it has ended: until then every look would be many requests.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._collector = facts.Collector(RunHandle(run.directory, follows=False))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="rankzero-report", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The run has ended: writes the report of all of it."""
        self._ended.set()
        self._thread.join(END_TIMEOUT)
        if self._thread.is_alive():
            logger.warning("the report of the run takes more than %g s; `rankzero report` makes it", END_TIMEOUT)
            # At an object store there is none of before, and nobody waits for it again.
            with contextlib.suppress(OSError):
                if not self._run.is_remote:
                    store.remove(self._run.path(page.REPORT_FILE))

    def _refresh(self) -> None:
        interval = REFRESH_INTERVAL
        while not self._ended.wait(None if self._run.is_remote else interval):
            interval = max(REFRESH_INTERVAL, COST_SHARE * self._write())
        self._write()

    def _write(self) -> float:
        began = time.thread_time()
        try:
            text = page.render([self._collector.collect()])
            store.write_bytes(self._run.path(page.REPORT_FILE), text.encode("utf-8", "replace"))
        except Exception as error:
            logger.warning("the report of the run could not be written: %s", error)
        return time.thread_time() - began
