"""`Recorder`: everything the driver writes into the run directory, and what it remembers of it."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rankzero.policy import HEARTBEAT_INTERVAL, LOG_TAIL, LOG_TAIL_WIDTH
from rankzero.run import Appender, RunDirectory, RunStatus, process_namespace

logger = logging.getLogger(__name__)


class Recorder:
    """Writes status, events and logs of one run.

    Used by the driver's thread. A thread of its own writes the heartbeat, so that neither a slow
    reader of lines nor a large result on its way to the store makes a live driver look dead.
    """

    def __init__(self, run: RunDirectory, on_line: Callable[[str], None] | None = None) -> None:
        self._run = run
        self._on_line = on_line
        self._events = Appender(run, "events.jsonl")
        self._logs: dict[int, Appender] = {}
        self._tails: dict[int, deque[str]] = {}
        self._lock = threading.Lock()
        self._finished = threading.Event()
        self.status = RunStatus(
            driver_host=socket.gethostname(), driver_pid=os.getpid(), driver_namespace=process_namespace()
        )
        self._heart = threading.Thread(target=self._beat, name="rankzero-heartbeat", daemon=True)

    def update(self, **changes: Any) -> None:
        """Changes the status and writes it; a change of state is an event too."""
        before = self.status.state
        self._write(changes)
        if self.status.state != before:
            self.event({"type": "state", "state": self.status.state})
        if not self._heart.ident:
            self._heart.start()

    def _write(self, changes: dict[str, Any]) -> None:
        with self._lock:
            self.status = replace(self.status, heartbeat=time.time(), **changes)
            self._run.write_status(self.status)

    def _beat(self) -> None:
        while not self._finished.wait(HEARTBEAT_INTERVAL):
            try:
                with self._lock:
                    if self._finished.is_set():
                        return
                    for appender in (self._events, *self._logs.values()):
                        appender.flush()
                self._write({})
            except OSError:
                logger.warning("the heartbeat could not be written", exc_info=True)

    def event(self, event: dict[str, Any]) -> None:
        """Appends an event."""
        with self._lock:
            self._events.append([json.dumps({"time": time.time(), **event})])

    def metric(self, rank: int, metrics: dict[str, Any], when: float) -> None:
        """Appends what a rank reported; rank 0's last values go into the status."""
        self.event({"type": "metric", "rank": rank, "metrics": metrics, "time": when})
        if rank == 0:
            self.status.metrics.update(metrics)

    def log(self, rank: int, lines: list[str]) -> None:
        """Appends lines of a rank to its file, and passes them on with their prefix."""
        with self._lock:
            if rank not in self._logs:
                self._logs[rank] = Appender(self._run, f"logs/rank-{rank}.log")
                self._tails[rank] = deque(maxlen=LOG_TAIL)
            self._logs[rank].append(lines)
        self._tails[rank].extend(line[:LOG_TAIL_WIDTH] for line in lines[-LOG_TAIL:])
        if self._on_line:
            for line in lines:
                self._on_line(f"[{rank}] {line}")

    def tail(self, rank: int) -> list[str]:
        """The last lines of a rank."""
        return list(self._tails.get(rank, ()))

    def finish(self, **changes: Any) -> None:
        """Closes the files, then writes the final status: a reader who sees it sees everything."""
        self.event({"type": "state", "state": changes["state"]})
        with self._lock:
            self._finished.set()
            for appender in (self._events, *self._logs.values()):
                appender.close()
        self._write({**changes, "ended": time.time()})
