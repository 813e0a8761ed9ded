"""`Recorder`: everything the driver writes into the run directory, and what it remembers of it."""

from __future__ import annotations

import json
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rankzero.policy import HEARTBEAT_INTERVAL, LOG_TAIL
from rankzero.run import Appender, RunDirectory, RunStatus


class Recorder:
    """Writes status, events and logs of one run. Used by one thread."""

    def __init__(self, run: RunDirectory, on_line: Callable[[str], None] | None = None) -> None:
        self._run = run
        self._on_line = on_line
        self._events = Appender(run, "events.jsonl")
        self._logs: dict[int, Appender] = {}
        self._tails: dict[int, deque[str]] = {}
        self._next_heartbeat = 0.0
        self.status = RunStatus(driver_host=socket.gethostname(), driver_pid=os.getpid())

    def update(self, **changes: Any) -> None:
        """Changes the status and writes it; a change of state is an event too."""
        before = self.status.state
        self.status = replace(self.status, heartbeat=time.time(), **changes)
        self._run.write_status(self.status)
        self._next_heartbeat = time.monotonic() + HEARTBEAT_INTERVAL
        if self.status.state != before:
            self.event({"type": "state", "state": self.status.state})

    def beat(self) -> None:
        """Writes a heartbeat, and what waits for an object store, if it is time."""
        if time.monotonic() >= self._next_heartbeat:
            self.update()
            self._flush()

    def event(self, event: dict[str, Any]) -> None:
        """Appends an event."""
        self._events.append([json.dumps({"time": time.time(), **event})])

    def metric(self, rank: int, metrics: dict[str, Any], when: float) -> None:
        """Appends what a rank reported; rank 0's last values go into the status."""
        self.event({"type": "metric", "rank": rank, "metrics": metrics, "time": when})
        if rank == 0:
            self.status.metrics.update(metrics)

    def log(self, rank: int, lines: list[str]) -> None:
        """Appends lines of a rank to its file, and passes them on with their prefix."""
        if rank not in self._logs:
            self._logs[rank] = Appender(self._run, f"logs/rank-{rank}.log")
            self._tails[rank] = deque(maxlen=LOG_TAIL)
        self._logs[rank].append(lines)
        self._tails[rank].extend(lines[-LOG_TAIL:])
        if self._on_line:
            for line in lines:
                self._on_line(f"[{rank}] {line}")

    def tail(self, rank: int) -> list[str]:
        """The last lines of a rank."""
        return list(self._tails.get(rank, ()))

    def finish(self, **changes: Any) -> None:
        """Closes the files, then writes the final status: a reader who sees it sees everything."""
        self.event({"type": "state", "state": changes["state"]})
        for appender in (self._events, *self._logs.values()):
            appender.close()
        self.status = replace(self.status, heartbeat=time.time(), ended=time.time(), **changes)
        self._run.write_status(self.status)

    def _flush(self) -> None:
        for appender in (self._events, *self._logs.values()):
            appender.flush()
