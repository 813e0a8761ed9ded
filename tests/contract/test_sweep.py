"""`Launcher.map`: trials side by side, on real runs."""

import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import until

from rankzero import InvalidJobError, Launcher, ResultError, RunHandle, WorkerFailedError
from rankzero.run.listing import list_runs


def train(lr: float, steps: int = 3, pause: float = 0.0, fails: bool = False) -> dict[str, float]:
    import rankzero.train as rt

    for step in range(steps):
        rt.report({"loss": (lr - 0.3) ** 2 + 1 / (step + 1), "rank": rt.get_context().rank})
        time.sleep(pause)
    # Rank 1 might end rank 0 before that has reported.
    if fails and rt.get_context().rank == 0:
        raise ValueError(f"lr {lr} diverges")
    return {"lr": lr}


def test_a_sweep_names_its_trials_and_its_best_and_a_failure_ends_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = Launcher(2, store=tmp_path, run_id="lr")
    params: list[dict[str, Any]] = [{"lr": 0.1}, {"lr": 0.9, "fails": True}, {"lr": 0.3}]
    sweep = launcher.map(train, params, metric="loss", max_parallel=2)
    assert [(trial.number, trial.params, trial.state) for trial in sweep] == [
        (number, each, "failed" if "fails" in each else "succeeded") for number, each in enumerate(params)
    ]
    assert (sweep.best.params, sweep.best.value, sweep.best.load()) == ({"lr": 0.3}, 1 / 3, {"lr": 0.3})
    with pytest.raises(WorkerFailedError, match=r"lr 0\.9 diverges"):
        sweep[1].load()
    printed = capsys.readouterr().out.splitlines()
    assert f"trial 0 ({{'lr': 0.1}}) runs in {sweep[0].directory}" in printed
    assert f"trial 2 ({{'lr': 0.3}}) succeeded: loss {1 / 3}" in printed
    assert any(line.startswith("trial 1 ({'lr': 0.9, 'fails': True}) failed: ") for line in printed)
    # The call has returned: the next one delivers nothing, also if a trial fails each night.
    began = [RunHandle.attach(trial.directory).job.created for trial in sweep]
    again = launcher.map(train, params)
    assert [trial.state for trial in again] == [trial.state for trial in sweep]
    assert all(RunHandle.attach(trial.directory).job.created > when for trial, when in zip(again, began, strict=True))
    with pytest.raises(WorkerFailedError, match=r"lr 0\.9 diverges"):
        _ = again.best


@pytest.mark.parametrize(("params", "error"), [({"fails": True}, r"lr 0\.1 diverges"), ({}, "the metric 'los'")])
def test_without_a_value_there_is_no_best(tmp_path: Path, params: dict[str, Any], error: str) -> None:
    done = Launcher(store=tmp_path).map(train, [{"lr": 0.1, **params}, {"lr": 0.2, **params}], metric="los")
    with pytest.raises((WorkerFailedError, ResultError), match=error):
        _ = done.best


def report_all(curve: list[Any]) -> Any:
    import rankzero.train as rt

    for loss in curve:
        rt.report({"loss": loss})
    return curve[-1]


@pytest.mark.parametrize(("mode", "sign"), [("min", 1), pytest.param("max", -1, marks=pytest.mark.soak)])
def test_value_and_result_are_of_one_moment_and_a_diverged_trial_is_the_worst(
    tmp_path: Path, mode: Any, sign: int
) -> None:
    # The last integer fits into no float.
    curves = [[0.9, 0.5, math.nan], [1.0, 0.8, 0.6], [0.9, 0.4, -math.inf], [0.3, 0.7, 0.9], [-(10**400)]]
    params = [{"curve": [sign * loss for loss in curve]} for curve in curves]
    sweep = Launcher(store=tmp_path).map(report_all, params, metric="loss", mode=mode)
    assert (sweep.best.number, sweep.best.value, sweep.best.load()) == (1, sign * 0.6, sign * 0.6)
    assert [trial.value for trial in sweep][2:] == [sign * curve[-1] for curve in curves[2:]]


def meet(name: str, places: str) -> int:
    Path(places, name).touch()
    until(lambda: len(os.listdir(places)) == 2, 60, "the other trial")
    return 2


def test_max_parallel_trials_run_at_the_same_time(tmp_path: Path) -> None:
    (tmp_path / "places").mkdir()
    params = [{"name": name, "places": str(tmp_path / "places")} for name in ("a", "b")]
    met = Launcher(store=tmp_path / "store").map(meet, params, max_parallel=2)
    assert [trial.load() for trial in met] == [2, 2]


def directory_of(folder: Path, rate: float) -> Path:
    return next(place for place in folder.glob("s-*") if RunHandle[Any].attach(place).params["lr"] == rate)


def test_an_interrupt_ends_all_trials_and_the_next_call_trains_only_the_rest(tmp_path: Path) -> None:
    def interrupt() -> None:
        try:
            # Each is started by a thread of its own.
            until(lambda: len(list(tmp_path.glob("s-*/submissions/0.json"))) == 2, 120, "both trials")
            first, second = (RunHandle[Any].attach(directory_of(tmp_path, rate)) for rate in (0.1, 0.2))
            until(lambda: second.status().metrics and first.status().final, 120, "its metrics")
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    begun: list[dict[str, Any]] = [{"lr": 0.1}, {"lr": 0.2, "steps": 100_000, "pause": 0.05}]
    try:
        with pytest.raises(KeyboardInterrupt):
            Launcher(store=tmp_path, run_id="s").map(train, begun, metric="loss", max_parallel=2)
    finally:
        thread.join()
    first, second = (directory_of(tmp_path, rate) for rate in (0.1, 0.2))
    assert RunHandle[Any].attach(second).wait(60)
    assert {one.status.state for one in list_runs(tmp_path)} == {"succeeded", "cancelled"}
    began = RunHandle.attach(first).job.created
    # A trial more, and another order. What the run id had reported before counts for nothing.
    params: list[dict[str, Any]] = [{"lr": 0.5, "steps": 1}, {"lr": 0.2, "steps": 1}, {"lr": 0.1}]
    again = Launcher(store=tmp_path, run_id="s").map(train, params, metric="loss")
    assert [trial.state for trial in again] == ["succeeded"] * 3
    assert again[1].value == pytest.approx(1.01)
    assert RunHandle.attach(again[2].directory).job.created == began, "it was delivered, and did not train again"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": [3]}, "params has 3"),
        ({"max_parallel": 0}, "max_parallel is 0"),
        ({"mode": "least"}, "mode is 'least'"),
        ({"params": [{"lr": threading.Lock()}, {}]}, "cannot be pickled"),
        ({"params": [{"lr": threading.Lock()}], "run_id": "s"}, "cannot be pickled"),
        ({"params": [{"lr": 0.1}, {}, {"lr": 0.1}], "run_id": "s"}, "equal arguments twice"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"params": [{"lr": 0.1}], **options}
    launcher = Launcher(store=tmp_path / "store", run_id=given.pop("run_id", None))
    with pytest.raises(InvalidJobError, match=message):
        launcher.map(train, given.pop("params"), **given)
    assert not (tmp_path / "store").exists()


def test_an_error_of_the_store_fails_one_trial_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = RunHandle.result_ref

    def broken(handle: RunHandle[Any], timeout: float | None = None) -> Any:
        if handle.params["lr"] == 0.1:
            raise OSError("the store is away")
        return asked(handle, timeout)

    monkeypatch.setattr(RunHandle, "result_ref", broken)
    done = Launcher(store=tmp_path, run_id="s").map(train, [{"lr": 0.1}, {"lr": 0.2}], metric="loss")
    assert [trial.state for trial in done] == ["failed", "succeeded"]
    assert isinstance(done[0].error, OSError)
