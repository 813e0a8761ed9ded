"""`Launcher.map`: trials side by side, on real runs."""

import contextlib
import io
import math
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import until

from rankzero import InvalidJobError, Launcher, ResultError, RunHandle, WorkerFailedError
from rankzero.run.listing import list_runs
from rankzero.sweep import Sweep


def train(lr: float, steps: int = 3, pause: float = 0.0, fails: bool = False) -> dict[str, float]:
    import time

    import rankzero.train as rt

    for step in range(steps):
        rt.report({"loss": (lr - 0.3) ** 2 + 1 / (step + 1), "rank": rt.get_context().rank})
        time.sleep(pause)
    # Rank 1 might end rank 0 before that has reported.
    if fails and rt.get_context().rank == 0:
        raise ValueError(f"lr {lr} diverges")
    return {"lr": lr}


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """The lines that the sweep has printed."""
    return []


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory, printed: list[str]) -> Sweep:
    params: list[dict[str, Any]] = [{"lr": 0.1}, {"lr": 0.9, "fails": True}, {"lr": 0.3}, {"lr": 0.5}]
    launcher = Launcher(2, store=tmp_path_factory.mktemp("sweep"), run_id="lr")
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        found = launcher.map(train, params, metric="loss", max_parallel=2)
    printed += stream.getvalue().splitlines()
    return found


def test_the_lines_of_a_sweep_say_what_begins_and_what_has_ended(sweep: Sweep, printed: list[str]) -> None:
    assert [f"trial 0 ({{'lr': 0.1}}) runs in {sweep[0].directory}"] == [
        line for line in printed if "0.1}) runs" in line
    ]
    assert len([line for line in printed if " runs in " in line]) == 4
    assert any(line.startswith("trial 1 ({'lr': 0.9, 'fails': True}) failed: ") for line in printed)
    assert f"trial 2 ({{'lr': 0.3}}) succeeded: loss {1 / 3}" in printed
    assert f"trial 3 ({{'lr': 0.5}}) succeeded: loss {sweep[3].value}" in printed


def test_the_best_trial_is_that_of_the_least_loss(sweep: Sweep) -> None:
    assert [trial.state for trial in sweep] == ["succeeded", "failed", "succeeded", "succeeded"]
    assert sweep.best.params == {"lr": 0.3}
    assert sweep.best.value == pytest.approx(1 / 3)
    assert sweep.best.load() == {"lr": 0.3}


def test_a_trial_that_fails_says_why_and_ends_nothing_else(sweep: Sweep) -> None:
    assert isinstance(sweep[1].error, WorkerFailedError)
    with pytest.raises(WorkerFailedError, match=r"lr 0\.9 diverges"):
        sweep[1].load()
    assert sweep[1].metrics["loss"] > 0.36


def test_without_success_the_best_raises_the_first_error(tmp_path: Path) -> None:
    failed = Launcher(store=tmp_path).map(
        train, [{"lr": 0.1, "fails": True}, {"lr": 0.2, "fails": True}], metric="loss"
    )
    with pytest.raises(WorkerFailedError, match=r"lr 0\.1 diverges"):
        _ = failed.best


def test_a_number_that_no_float_holds_is_the_worst_value(tmp_path: Path) -> None:
    def train(loss: int) -> None:
        import rankzero.train as rt

        rt.report({"loss": loss})

    sweep = Launcher(1, store=tmp_path).map(train, [{"loss": 10**400}, {"loss": 3}], metric="loss", mode="max")
    assert [trial.state for trial in sweep] == ["succeeded", "succeeded"]
    assert sweep.best.params == {"loss": 3}


def test_max_parallel_trials_run_at_the_same_time(tmp_path: Path) -> None:
    def meet(name: str, places: str) -> int:
        import os
        import time

        open(f"{places}/{name}", "w").close()
        deadline = time.monotonic() + 60
        while len(os.listdir(places)) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        return len(os.listdir(places))

    places = tmp_path / "places"
    places.mkdir()
    params = [{"name": name, "places": str(places)} for name in ("a", "b")]
    met = Launcher(store=tmp_path / "store").map(meet, params, max_parallel=2)
    assert [trial.load() for trial in met] == [2, 2]


def directory_of(folder: Path, rate: float) -> Path:
    found = [place for place in folder.glob("s-*") if RunHandle[Any].attach(place).params["lr"] == rate]
    return found[0]


def test_an_interrupt_ends_all_trials_and_the_next_call_trains_only_the_rest(tmp_path: Path) -> None:
    def interrupt() -> None:
        try:
            # Each is started by a thread of its own.
            until(lambda: len(list(tmp_path.glob("s-*/job.json"))) == 2, 120, "both trials")
            first, second = (RunHandle[Any].attach(directory_of(tmp_path, rate)) for rate in (0.1, 0.2))
            until(lambda: second.status().metrics and first.status().final, 120, "its metrics")
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    begun: list[dict[str, Any]] = [{"lr": 0.1}, {"lr": 0.2, "steps": 100_000, "pause": 0.05}]
    with pytest.raises(KeyboardInterrupt):
        Launcher(store=tmp_path, run_id="s").map(train, begun, metric="loss", max_parallel=2)
    thread.join()
    first, second = (directory_of(tmp_path, rate) for rate in (0.1, 0.2))
    assert RunHandle[Any].attach(second).wait(60)
    assert {one.status.state for one in list_runs(tmp_path)} == {"succeeded", "cancelled"}
    began = RunHandle.attach(first).created
    # A trial more, and another order.
    params: list[dict[str, Any]] = [{"lr": 0.5}, {"lr": 0.2}, {"lr": 0.1}]
    again = Launcher(store=tmp_path, run_id="s").map(train, params, metric="loss")
    assert [trial.state for trial in again] == ["succeeded"] * 3
    # Its result was delivered, and it did not train again.
    assert RunHandle.attach(again[2].directory).created == began
    third = Launcher(store=tmp_path, run_id="s").map(train, params, metric="loss")
    assert RunHandle.attach(third[2].directory).created > began


def test_a_call_that_has_returned_is_delivered_whatever_failed_in_it(tmp_path: Path) -> None:
    """Else a setting that fails each night would deliver the models of the first night for ever."""
    launcher = Launcher(store=tmp_path, run_id="s")
    params = [{"lr": 0.1, "steps": 1}, {"lr": 0.9, "steps": 1, "fails": True}]
    first = launcher.map(train, params)
    assert [trial.state for trial in first] == ["succeeded", "failed"]
    began = [RunHandle.attach(trial.directory).created for trial in first]
    again = launcher.map(train, params)
    assert [trial.state for trial in again] == ["succeeded", "failed"]
    assert all(RunHandle.attach(trial.directory).created > when for trial, when in zip(again, began, strict=True))


# By default: an interrupt, which is an exception in the caller as well.
@pytest.mark.soak
def test_an_exception_in_the_caller_ends_all_trials(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def interrupt() -> None:
        until(lambda: any(one.status.metrics for one in list_runs(tmp_path)), 120, "a metric")
        os.kill(os.getpid(), signal.SIGUSR1)

    def raise_stop(*_: object) -> None:
        raise Stop

    before = signal.signal(signal.SIGUSR1, raise_stop)
    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        with pytest.raises(Stop):
            Launcher(store=tmp_path).map(train, [{"lr": 0.1, "steps": 10_000, "pause": 0.05}] * 2, max_parallel=2)
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    until(lambda: all(one.status.final for one in list_runs(tmp_path)), 60, "the end of all trials")
    assert {one.status.state for one in list_runs(tmp_path)} == {"cancelled"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": []}, "params is empty"),
        ({"params": [3]}, "params has 3"),
        ({"max_parallel": 0}, "max_parallel is 0"),
        ({"mode": "least"}, "mode is 'least'"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"params": [{"lr": 0.1}], **options}
    with pytest.raises(InvalidJobError, match=message):
        Launcher(store=tmp_path / "store").map(train, given.pop("params"), **given)
    assert not (tmp_path / "store").exists()


def report_all(curve: list[float]) -> float:
    import rankzero.train as rt

    for loss in curve:
        rt.report({"loss": loss})
    return curve[-1]


@pytest.mark.parametrize(("mode", "sign"), [("min", 1.0), pytest.param("max", -1.0, marks=pytest.mark.soak)])
def test_value_and_result_are_of_one_moment_and_a_diverged_trial_is_the_worst(
    tmp_path: Path, mode: Any, sign: float
) -> None:
    curves = [[0.9, 0.5, math.nan], [1.0, 0.8, 0.6], [0.9, 0.4, -math.inf], [0.9, math.inf], [0.3, 0.7, 0.9]]
    params = [{"curve": [sign * loss for loss in curve]} for curve in curves]
    sweep = Launcher(store=tmp_path).map(report_all, params, metric="loss", mode=mode)
    assert (sweep.best.number, sweep.best.value, sweep.best.load()) == (1, sign * 0.6, sign * 0.6)
    assert [trial.value for trial in sweep][2:] == [sign * curve[-1] for curve in curves[2:]]


def test_a_metric_that_no_trial_has_reported_is_named(tmp_path: Path) -> None:
    done = Launcher(1, store=tmp_path).map(train, [{"lr": 0.3, "steps": 1}], metric="los")
    with pytest.raises(ResultError, match="has reported 'los' on rank 0"):
        _ = done.best


def test_no_metric_no_best(tmp_path: Path) -> None:
    done = Launcher(store=tmp_path).map(train, [{"lr": 0.1}])
    with pytest.raises(InvalidJobError, match='give map\\(..., metric="loss"\\)'):
        _ = done.best


def test_what_another_training_of_the_run_id_reported_counts_for_nothing(tmp_path: Path) -> None:
    launcher = Launcher(store=tmp_path, run_id="s")
    launcher.map(train, [{"lr": 0.3, "steps": 1}], metric="loss")
    again = launcher.map(train, [{"lr": 2.0, "steps": 1}, {"lr": 1.0, "steps": 1}], metric="loss")
    assert again.best.params["lr"] == 1.0
    assert again[0].value == pytest.approx(1.7**2 + 1)


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


def test_what_no_trial_can_run_is_refused_and_no_table_of_failures(tmp_path: Path) -> None:
    lock = threading.Lock()

    def captures() -> bool:
        return lock.locked()

    with pytest.raises(InvalidJobError):
        Launcher(store=tmp_path).map(captures, [{}, {}, {}])
