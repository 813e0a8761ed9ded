"""What trackers make of events."""

from __future__ import annotations

import math
from typing import Any

from rankzero.tracking.tracker import Row, Rows


def metric(rank: int, **metrics: Any) -> dict[str, Any]:
    return {"type": "metric", "time": 1.0, "rank": rank, "metrics": metrics}


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
