"""Rows, throughput, table and curves of what rank 0 reported."""

import itertools
import math
from typing import Any

import pytest

from rankzero.report import curves
from rankzero.report.summary import Summary
from rankzero.run import reports


def events(*metrics: dict[str, Any], rank: int = 0) -> list[dict[str, Any]]:
    return [
        {"type": "metric", "rank": rank, "time": 100.0 + number, "metrics": each} for number, each in enumerate(metrics)
    ]


def test_rows_are_the_reports_of_rank_zero() -> None:
    others = [{"type": "state", "time": 0.0, "state": "running"}, *events({"loss": 9.0}, rank=1)]
    rows = reports.rows_of([*others, *events({"loss": 2.0}, {"loss": 1.0, "report": "mine"})])
    assert rows == [
        {"report": 1, "loss": 2.0, "time": 100.0},
        {"report": 2, "loss": 1.0, "metrics.report": "mine", "time": 101.0},
    ]
    assert reports.rows_of(others) == []


def test_a_long_training_keeps_some_and_the_last() -> None:
    rows = reports.rows_of(events(*({"step": step} for step in range(5000))))
    assert len(rows) <= 2 * reports.KEPT_ROWS + 1
    assert (rows[0]["step"], rows[-1]["step"]) == (0, 4999)
    shown = curves.evenly(rows, 5)
    assert (len(shown), shown[0], shown[-1]) == (5, rows[0], rows[-1])


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ([{"step": 0}, {"step": 50}], {"steps_per_second": 50.0}),
        ([{"step": 0, "samples": 0}, {"step": 50, "samples": 800}], {"samples_per_second": 800.0}),
        # Trained before, up to another step: counted is the training that came last.
        ([{"epoch": 1}, {"epoch": 9}, {"epoch": 1}, {"epoch": 3}], {"epochs_per_second": 2.0}),
        ([{"step": 5}], {}),
        ([{"step": 5}, {"step": 5}], {}),
        # Their difference is no float.
        ([{"step": -(2**1023)}, {"step": 2**1023}], {}),
        ([{"step": -1.7e308}, {"step": 1.7e308}], {}),
        ([{"step": True}, {"step": math.nan}, {"loss": 1.0}], {}),
        ([], {}),
    ],
)
def test_throughput(metrics: list[dict[str, Any]], expected: dict[str, float]) -> None:
    assert reports.throughput(reports.rows_of(events(*metrics))) == expected


def test_the_wait_for_an_attempt_is_no_training_time() -> None:
    def attempt(number: int, start: float, *steps: int) -> list[dict[str, Any]]:
        state = {"type": "state", "state": "starting", "attempt": number, "time": start}
        told = events(*({"step": step} for step in steps))
        return [state, *({**each, "time": start + each["time"]} for each in told)]

    # The second attempt resumes at a checkpoint, the third one behind the last report; the last one reports once.
    trained = [attempt(0, 0, 0, 10, 20), attempt(1, 1000, 10, 20), attempt(2, 5000, 30, 30, 60), attempt(3, 9000, 61)]
    told = [*itertools.chain.from_iterable(trained)]
    rows, summary = reports.rows_of(told), Summary()
    for event in told:
        summary.add(event)
    assert summary.facts()["throughput"] == {"steps_per_second": 12.0}
    assert reports.throughput(rows) == {"steps_per_second": 12.0}


def test_a_curve_is_drawn_from_edge_to_edge_with_a_gap_for_what_is_not_finite() -> None:
    rows = reports.rows_of(events(*({"loss": value} for value in (2.0, 1.5, math.nan, 1.0, math.inf, 1.5))))
    assert curves.loss_names(rows) == ["loss"]
    drawn = curves.svg(rows, ["loss"], 272, 140)
    assert drawn is not None
    assert 'd="M64.0,22.0h0L104.0,72.0M184.0,122.0h0M264.0,72.0h0"' in drawn
    assert ">2</text>" in drawn
    assert ">1</text>" in drawn


@pytest.mark.parametrize("values", [[], [1.0], [math.nan, 1.0, math.nan], ["1", True, None]])
def test_a_metric_without_two_finite_values_is_not_drawn(values: list[Any]) -> None:
    rows = reports.rows_of(events(*({"loss": value} for value in values)))
    assert curves.svg(rows, ["loss"]) is None
    assert curves.chart(rows, ["loss"]) is None


def test_values_whose_difference_is_no_float_are_drawn() -> None:
    drawn = curves.svg([{"loss": 1.7e308}, {"loss": -1.7e308}], ["loss"], 272, 140)
    assert drawn is not None
    assert 'd="M64.0,22.0h0L264.0,122.0"' in drawn
