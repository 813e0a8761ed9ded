"""`Reporter`: writes the run's report.html, repeatedly during the run and once at its end."""

from __future__ import annotations

import contextlib
import logging
import threading
import time

from rankzero import bounds, store
from rankzero.report import facts, page
from rankzero.run.directory import RunDirectory
from rankzero.run.handle import RunHandle

logger = logging.getLogger(__name__)

COST_SHARE = 500
"""Least interval between two reports as a multiple of the time that one took: 0.2 % of a core."""


class Reporter:
    """A thread that writes the report. Its errors are only logged, and never fail the run.

    A run in an object store gets its report at its end only, since each report takes many requests.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._collector = facts.Collector(RunHandle(run.directory, follows=False))
        self._ended = threading.Event()
        self._is_failing = False
        self._thread = threading.Thread(target=self._refresh, name="rankzero-report", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Writes the report of the whole run, which has ended."""
        self._ended.set()
        self._thread.join(bounds.REPORT_TIMEOUT)
        if self._thread.is_alive():
            logger.warning(
                "the report of the run takes more than %g s; `rankzero report` makes it", bounds.REPORT_TIMEOUT
            )
            # In an object store there is no earlier report, and a removal could block as long as the write does.
            with contextlib.suppress(OSError):
                if not self._run.is_remote:
                    store.remove(self._run.path(page.REPORT_FILE))

    def _refresh(self) -> None:
        interval = bounds.REPORT_INTERVAL
        while not self._ended.wait(None if self._run.is_remote else interval):
            interval = max(bounds.REPORT_INTERVAL, COST_SHARE * self._write())
        self._write()

    def _write(self) -> float:
        began = time.thread_time()
        try:
            text = page.render([self._collector.collect()])
            store.write_bytes(self._run.path(page.REPORT_FILE), text.encode("utf-8", "replace"))
        except Exception as error:
            if not self._is_failing:
                logger.warning("the report of the run could not be written: %s; trying again", error)
            self._is_failing = True
        else:
            self._is_failing = False
        return time.thread_time() - began
