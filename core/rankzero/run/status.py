"""`RunStatus`, a run's state at one moment, and its JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from rankzero.bounds import HEARTBEAT_INTERVAL
from rankzero.errors import RunNotFoundError

SHORTEST_PACE = 1.0  # Shortest interval in seconds between two writes to an object store, or polls of it
LONGEST_PACE = 10.0  # The longest: a run older than a quarter of an hour may receive a cancel that late
_SHARE = 0.01  # The interval between two of them, for each of which a store charges, as a share of the run's duration

STATES = ("pending", "starting", "running", "succeeded", "failed", "cancelled")
FINAL_STATES = frozenset({"succeeded", "failed", "cancelled"})


@dataclass(frozen=True)
class RunStatus:
    """A run's state at one moment. Times are Unix times."""

    state: str = "pending"  # One of `STATES`
    # Of the current attempt: opening, waiting for slots, starting, running, ending or final; empty before the first one
    phase: str = ""
    cancelling: bool = False  # The driver has decided to cancel the run without a request: a new submission resumes it
    attempt: int = 0  # Number of the current attempt
    preemptions: int = 0  # Number of preempted attempts of this submission
    submission: int = 0
    heartbeat: float = 0.0  # When the driver last wrote
    interval: float = HEARTBEAT_INTERVAL  # Seconds between two heartbeats
    queue_time: float = 0.0  # Seconds after which a driver that no cluster has started is dead; or 0
    written: dict[str, list[int]] = field(default_factory=dict)  # Piece and offset of the ends of `EVENTS` and `LINES`
    driver_host: str | None = None  # None before the driver has started
    driver_pid: int | None = None
    driver_namespace: str | None = None  # Process namespace of the id
    driver_start: str | None = None  # Start time of that process, in clock ticks since the boot
    driver_thread: bool = False  # True for a driver that is a thread of its caller's process
    started: float | None = None  # When every rank had started
    ended: float | None = None
    error: dict[str, Any] | None = None  # The error of a run that did not succeed, as JSON
    result: dict[str, Any] | None = None  # Handle of the value, as JSON, once success is certain: before the end
    value: list[Any] = field(default_factory=list)  # Holds the value itself if that is small and JSON
    metrics: dict[str, Any] = field(default_factory=dict)  # The last values of rank 0's metrics in this training
    checkpoint: str | None = None  # Id of the newest committed checkpoint
    engine_url: str | None = None  # Address of the engine's user interface, such as the Spark UI, during the run
    world_size: int | None = None  # Number of ranks of the current attempt of an elastic run; None if that is the job's
    ended_by: str = ""  # Identifies the process that has created the end of the submission

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
            if not facts.keys() >= {"state", "heartbeat"}:
                raise ValueError("it has no state and no heartbeat")
            return cls(**{name: value for name, value in facts.items() if name in cls.__dataclass_fields__})
        except (AttributeError, TypeError, ValueError) as error:
            raise RunNotFoundError(f"{path} was not written by rankzero: {error}") from None


def pace(age: float) -> float:
    """Returns the seconds between two writes of a driver, or polls of a follower, from the run's duration so far."""
    return min(max(age * _SHARE, SHORTEST_PACE), LONGEST_PACE)
