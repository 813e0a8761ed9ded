"""`StatsD`: counters, times and gauges, by UDP."""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankzero.errors import InvalidJobError
from rankzero.run.directory import RunDirectory
from rankzero.tracking.outcomes import Outcomes
from rankzero.tracking.rows import Rows
from rankzero.tracking.tracker import Tracker

if TYPE_CHECKING:
    from rankzero.run.directory import RunStatus
    from rankzero.run.handle import RunHandle

DATAGRAM = 1432
"""Bytes of a datagram that no network on the way has to split."""

_NO_NAME = re.compile(r"[^\w-]+")
_HOUR = 3600.0


@dataclass(eq=False)
class StatsD(Tracker):
    """Sends counters, times and gauges to a StatsD server.

    ``PREFIX.attempts`` and ``PREFIX.attempts.OUTCOME`` (``succeeded``, ``failed``, ``cancelled``, or the cause of a
    restart), ``PREFIX.runs.STATE``, the times ``PREFIX.start`` and ``PREFIX.run``, the gauges ``PREFIX.rank_hours`` and
    ``PREFIX.gpu_hours`` of an attempt that has ended, and ``PREFIX.metric.NAME``: what ranks report.

    Attributes:
        host: Of the server.
        port: Of the server.
        prefix: Of all names.
        ranks: Whose reports; None for all, of whom the last one counts.

    Example:
        >>> from rankzero import Launcher
        >>> launcher = Launcher(2, trackers=[StatsD("statsd", prefix="digits")])
    """

    host: str = "127.0.0.1"
    port: int = 8125
    prefix: str = "rankzero"
    ranks: Collection[int] | None = (0,)

    def check(self) -> None:
        """Raises InvalidJobError for a port that is none."""
        if not 0 < self.port < 65536:
            raise InvalidJobError(f"StatsD has port={self.port!r}; it must be from 1 to 65535")

    def begin(self, run: RunHandle[Any]) -> None:
        """Finds the server's address."""
        family, kind, protocol, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
        self._socket = socket.socket(family, kind, protocol)
        self._socket.connect(address)
        self._use_gpu = RunDirectory(run.directory).job().use_gpu
        self._rows, self._outcomes = Rows(self.ranks), Outcomes()

    def add(self, run: RunHandle[Any], events: list[dict[str, Any]]) -> None:
        """Sends the last value of each metric, and what has begun or ended."""
        last = {name: value for row in self._rows.of(events) for name, value in row.metrics.items()}
        lines = [
            _gauge(f"metric.{_NO_NAME.sub('_', name)}", value) for name, value in last.items() if math.isfinite(value)
        ]
        starts = sum(event["type"] == "state" and event["state"] == "starting" for event in events)
        lines += [f"attempts:{starts}|c"] if starts else []
        for attempt in self._outcomes.of(events):
            lines.append(f"attempts.{_NO_NAME.sub('_', attempt.cause)}:1|c")
            if attempt.started is not None:
                lines.append(f"start:{_ms(attempt.started - attempt.began)}|ms")
            hours = attempt.seconds * run.world_size / _HOUR
            lines += [f"{name}:{hours:g}|g" for name in ("rank_hours", *(["gpu_hours"] if self._use_gpu else []))]
        self._send(lines)

    def end(self, run: RunHandle[Any], status: RunStatus) -> None:
        """Counts the run."""
        with self._socket:
            if status.final:
                lines = [f"runs.{status.state}:1|c"]
                if status.started is not None and status.ended is not None:
                    lines.append(f"run:{_ms(status.ended - status.started)}|ms")
                self._send(lines)

    def _send(self, lines: list[str]) -> None:
        waiting = b""
        for line in lines:
            data = "\n".join(f"{self.prefix}.{part}" for part in line.split("\n")).encode()
            if waiting and len(waiting) + 1 + len(data) > DATAGRAM:
                self._socket.send(waiting)
                waiting = b""
            waiting = waiting + b"\n" + data if waiting else data
        if waiting:
            self._socket.send(waiting)


def _gauge(name: str, value: float) -> str:
    """A sign would mean a change: what is below zero is set from there."""
    return f"{name}:0|g\n{name}:{value:g}|g" if value < 0 else f"{name}:{value:g}|g"


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
