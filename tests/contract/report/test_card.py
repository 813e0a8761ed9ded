"""How far a run is, what it has used, and the card that a notebook shows of it."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.conftest import until

from rankzero import InvalidJobError, Launcher, RunHandle
from rankzero.report import card
from rankzero.report.summary import Summary, usage
from rankzero.run.status import RunStatus

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>"


def train(steps: int) -> None:
    import rankzero.train as rt

    rank = rt.get_context().rank
    for step in range(1, steps + 1 - rank):
        rt.report({"step": step, "total_steps": 10, "loss": 1 / step, HOSTILE: 1.0})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunHandle[None]:
    """Two ranks, of which rank 1 has done a step less."""
    store = tmp_path_factory.mktemp("card")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RANKZERO_PRICES", "core=36000, currency=EUR")
        Launcher(2, store=store, run_id="priced").run(train, 8)
    return RunHandle.attach(store / "priced")


def test_progress_is_that_of_each_rank_and_the_slowest_decides(run: RunHandle[None]) -> None:
    summary = Summary()
    summary.read(run, run.status())
    assert {rank: found.done for rank, found in summary.ranks.items()} == {0: 8, 1: 7}
    assert (summary.unit, summary.total, summary.slowest) == ("steps", 10, summary.ranks[1])
    rate = summary.ranks[1].rate
    assert rate
    assert summary.seconds_left == pytest.approx(3 / rate)
    # What was read once is not counted again.
    summary.read(run, run.status())
    assert [row["report"] for row in summary.rows] == list(range(1, 9))


def test_a_rank_that_is_gone_after_a_restart_does_not_count() -> None:
    def reports(ranks: int, steps: range) -> list[dict[str, Any]]:
        return [
            {"type": "metric", "rank": rank, "time": float(step), "metrics": {"step": step, "total_steps": 100}}
            for step in steps
            for rank in range(ranks)
        ]

    restart = {"type": "state", "state": "starting", "attempt": 1, "time": 10.0}
    summary = Summary()
    for event in [*reports(4, range(10)), restart, *reports(2, range(5, 50))]:
        summary.add(event)
    assert {rank: found.done for rank, found in summary.ranks.items()} == {0: 49, 1: 49}
    assert summary.seconds_left == pytest.approx(51)
    assert len(summary.rows) == 55


def test_a_store_that_refuses_does_not_end_the_run_whose_card_is_drawn(
    run: RunHandle[None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drawn: list[Any] = []
    display = SimpleNamespace(HTML=str, display=lambda html, display_id: SimpleNamespace(update=drawn.append))
    # Where there is no Jupyter; tests/doors/frameworks/test_notebook.py has a real kernel.
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()), display=display)
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    refused = iter([OSError("the store is away")])
    status = RunHandle.status

    def refuse_once(handle: RunHandle[None]) -> RunStatus:
        # Not to a thread that another test has left.
        for error in refused if handle is run else ():
            raise error
        return status(handle)

    monkeypatch.setattr(RunHandle, "status", refuse_once)
    with card.showing([run]):
        until(lambda: "the store is away" in caplog.text, 30, "the first look has failed")
    assert "succeeded" in drawn[-1]


def test_nothing_of_a_run_is_markup_in_its_card(run: RunHandle[None]) -> None:
    error = {"type": HOSTILE, "message": HOSTILE}
    job = replace(run.job, run_id=HOSTILE, name=HOSTILE)
    failed = card.render(job, HOSTILE, RunStatus(state="failed", error=error), Summary(), 0.0)
    for shown in (card.draw(run), failed):
        assert shown is not None
        assert "alert(1)" in shown
        assert set(re.findall(r"</?([a-z]+)", shown)) <= {"div", "b", "svg", "path", "text", "pre"}
        assert not re.search(r"<[^>]*\son\w+=", shown)


def test_a_run_that_lives_is_charged_until_now(run: RunHandle[None]) -> None:
    job = replace(run.job, use_gpu=True, prices={"gpu": 2.0})
    living = RunStatus(state="running", started=1000.0, heartbeat=2800.0)
    assert usage(job, living, 4600.0) == "2 GPU-hours, about 4"
    # Its driver has died: nobody knows of more than the last heartbeat.
    assert usage(job, replace(living, state="failed"), 99999.0) == "1 GPU-hours, about 2"
    assert usage(job, RunStatus(), 4600.0) == ""


@pytest.mark.parametrize("text", ["gpu", "gpu=cheap", "tpu=3", "gpu=-1", "currency="])
def test_prices_that_say_something_else_are_refused_before_a_start(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_PRICES", text)
    with pytest.raises(InvalidJobError, match=re.escape(repr(text))):
        Launcher(1, store=tmp_path).run(print)
    assert list(tmp_path.iterdir()) == []


def test_of_the_ranks_of_a_living_run_the_slowest_and_the_fastest_are_named(run: RunHandle[None]) -> None:
    summary = Summary()
    for rank in range(64):
        summary.add({"type": "metric", "rank": rank, "time": 1.0, "metrics": {"step": 100 - rank % 7}})
    shown = card.render(run.job, "/runs/a", RunStatus(state="running"), summary, 0.0)
    assert "94 (rank 6) to 100 (rank 0) steps" in shown
