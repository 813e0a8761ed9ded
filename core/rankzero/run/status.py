"""`RunStatus`, a run's state at one moment, and its JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from rankzero.bounds import HEARTBEAT_INTERVAL
from rankzero.errors import RunNotFoundError
from rankzero.job import strange

SHORTEST_PACE = 1.0  # Shortest interval in seconds between two writes to an object store, or polls of it
LONGEST_PACE = 10.0  # The longest: a run older than a quarter of an hour may receive a cancel that late

STATES = ("pending", "starting", "running", "succeeded", "failed", "cancelled")

_SHARE = 0.01
"""The interval between two writes to an object store, which charges requests, as a share of the run's duration."""

FINAL_STATES = frozenset({"succeeded", "failed", "cancelled"})


@dataclass(frozen=True)
class RunStatus:
    """A run's state at one moment.

    Attributes:
        state: One of `STATES`.
        phase: State of the current attempt: ``"opening"``, ``"waiting for slots"``, ``"starting"``, ``"running"``,
            ``"ending"`` or ``"final"``; empty before the first one.
        cancelling: The driver has decided to cancel the run without a request, so a new submission resumes the run.
        attempt: Number of the current attempt, from 0.
        preemptions: Number of preempted attempts of this submission.
        submission: Number of the submission.
        heartbeat: Unix time at which the driver last wrote.
        interval: Seconds between two heartbeats.
        queue_time: Seconds without a heartbeat after which a driver that a cluster has not started is dead; or 0.
        written: Ends of `EVENTS` and `LINES` on an object store, each as piece and offset.
        driver_host: Host of the driver, or None before it started.
        driver_pid: Process id of the driver.
        driver_namespace: Process namespace of ``driver_pid``.
        driver_start: Start time of that process, in clock ticks since the boot.
        driver_thread: Id and start time of the driver's thread, if it is a thread of its caller's process; else None.
        started: Unix time at which every rank had started, or None.
        ended: Unix time of the end, or None.
        error: The error of a run that did not succeed, as JSON.
        result: Handle of the value, as JSON; set as soon as success is certain, before the run has ended.
        value: A list with the value itself if that is small and JSON; else empty.
        metrics: The last values of the metrics that rank 0 reported in this training, of the first 1000 names.
        checkpoint: Id of the newest committed checkpoint, or None.
        engine_url: Address of the engine's user interface, such as the Spark UI, during the run; or None.
        world_size: Number of ranks of the current attempt of an elastic run; None if that is the job's.
        held_seconds: Seconds for which ranks of ended attempts occupied their slots, summed over the ranks.
        held_since: Unix time since which the current attempt occupies its slots; None between attempts.
        ended_by: Identifies the process that has created the end of the submission.
    """

    state: str = "pending"
    phase: str = ""
    cancelling: bool = False
    attempt: int = 0
    preemptions: int = 0
    submission: int = 0
    heartbeat: float = 0.0
    interval: float = HEARTBEAT_INTERVAL
    queue_time: float = 0.0
    written: dict[str, list[int]] = field(default_factory=dict)
    driver_host: str | None = None
    driver_pid: int | None = None
    driver_namespace: str | None = None
    driver_start: str | None = None
    driver_thread: str | None = None
    started: float | None = None
    ended: float | None = None
    error: dict[str, Any] | None = None
    result: dict[str, Any] | None = None
    value: list[Any] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    engine_url: str | None = None
    world_size: int | None = None
    held_seconds: float = 0.0
    held_since: float | None = None
    ended_by: str = ""

    @property
    def shown(self) -> str:
        """The state, and the phase of the attempt where that says more, such as ``starting (waiting for slots)``."""
        return self.state if self.final or self.phase in ("", self.state) else f"{self.state} ({self.phase})"

    @property
    def final(self) -> bool:
        """Returns True if the run has ended."""
        return self.state in FINAL_STATES

    @property
    def certain(self) -> bool:
        """Returns True if the outcome is known: the run has ended, or its success is already recorded."""
        return self.final or self.result is not None

    def to_json(self) -> bytes:
        """Returns the status as a JSON object."""
        return json.dumps(vars(self)).encode()

    @classmethod
    def from_json(cls, data: bytes, path: str) -> RunStatus:
        """Reads what `to_json` returned. Raises RunNotFoundError, with the path, if rankzero has not written this."""
        try:
            facts = json.loads(data)
            if found := strange(facts, {"state": str, "heartbeat": (int, float)}):
                raise ValueError(found)
            return cls(**{name: value for name, value in facts.items() if name in cls.__dataclass_fields__})
        except (AttributeError, TypeError, ValueError) as error:
            raise RunNotFoundError(f"{path} was not written by rankzero: {error}") from None


def pace(age: float) -> float:
    """Returns the seconds between two writes of a driver, or two polls of a follower, from the run's duration so far.

    Example:
        >>> pace(20), pace(300), pace(86400)
        (1.0, 3.0, 10.0)
    """
    return min(max(age * _SHARE, SHORTEST_PACE), LONGEST_PACE)
