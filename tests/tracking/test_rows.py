"""What trackers make of events."""

from __future__ import annotations

import math
from typing import Any

from rankzero.tracking.opentelemetry import Attempt, Outcomes
from rankzero.tracking.tracker import Row, Rows


def metric(rank: int, **metrics: Any) -> dict[str, Any]:
    return {"type": "metric", "time": 1.0, "rank": rank, "metrics": metrics}


def state(when: float, state: str, attempt: int) -> dict[str, Any]:
    return {"type": "state", "time": when, "state": state, "attempt": attempt}


def test_rows_are_at_their_step_or_counted() -> None:
    events = [metric(0, loss=1.0), metric(1, loss=9.0), metric(0, loss=0.5, step=7, note="x", done=True), {"type": "x"}]
    assert list(Rows((0,)).of(events)) == [Row(0, 1, 1.0, {"loss": 1.0}), Row(0, 7, 1.0, {"loss": 0.5})]
    assert [row.rank for row in Rows(None).of(events)] == [0, 1, 0]
    (row,) = Rows((0,)).of([metric(0, loss=float("nan"), epoch=3)])
    assert row.step == 3
    assert math.isnan(row.metrics["loss"])


def test_what_no_system_could_store_is_left_out() -> None:
    events = [metric(0, loss=0.5, step=2**63), metric(0, loss=0.25, step=2**62, huge=10**400)]
    assert [(row.step, row.metrics) for row in Rows((0,)).of(events)] == [(1, {"loss": 0.5}), (2**62, {"loss": 0.25})]


def test_attempts_end_by_restarts_and_with_the_run() -> None:
    outcomes = Outcomes()
    first = [state(1, "starting", 0), state(3, "running", 0)]
    second = [
        {"type": "failure", "time": 5, "what": "rank 1 was killed"},
        {"type": "restart", "time": 6, "attempt": 1, "cause": "killed", "what": "rank 1 was killed", "pause": 1},
        state(7, "starting", 1),
        {"type": "failure", "time": 8, "what": "ValueError: no"},
        state(9, "failed", 1),
    ]
    assert list(outcomes.of(first)) == []
    killed, failed = outcomes.of(second)
    assert killed == Attempt(0, 1, 3, 6, "killed", "rank 1 was killed")
    assert killed.seconds == 3
    assert failed == Attempt(1, 7, None, 9, "failed", "ValueError: no")
    assert failed.seconds == 0
