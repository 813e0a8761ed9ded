"""What an earlier run of a task instance is to a try: one of its own generation, or of one before a clear."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rankzero import Launcher, RankZeroError

PATIENCE = 30.0


def train(folder: str, fail: bool = False) -> int:
    import os
    import time

    import rankzero.train as rt

    if not rt.get_checkpoint():
        rt.report({}, checkpoint={"epoch": 1})
        if fail:
            time.sleep(0.5)
            raise ValueError("the first time")
    while not Path(folder, "go").exists():
        time.sleep(0.02)
    return -os.getpid() if rt.get_checkpoint() else os.getpid()


def launcher_of(tmp_path: Path, generation: int, arguments: str = "same") -> Launcher:
    labels = {"generation": str(generation), "arguments": arguments}
    return Launcher(1, store=tmp_path / "store", run_id="task", labels=labels)


def try_of(generation: int, number: int) -> Any:
    return SimpleNamespace(max_tries=generation, try_number=number)


def settle(launcher: Launcher, ti: Any) -> None:
    from airflow_rankzero import delivery

    before = launcher.find()
    assert before is not None
    assert launcher.labels
    delivery.settle(before, ti, launcher.labels["arguments"], PATIENCE)


@pytest.mark.parametrize(
    ("got", "asks", "arguments", "again"),
    [
        pytest.param(None, (1, 2), "same", False, id="a try died before it could hand the result on"),
        pytest.param((1, 1), (1, 2), "same", False, id="a try died while it did, or Airflow did not take its word"),
        pytest.param((1, 1), (1, 1), "same", True, id="the DAG run was deleted and made anew"),
        pytest.param((1, 1), (2, 2), "same", True, id="cleared after a success"),
        pytest.param(None, (2, 2), "same", False, id="cleared, but nobody had got the result"),
        pytest.param(None, (2, 2), "other", True, id="cleared, and something else is asked for"),
        pytest.param(None, (1, 2), "other", False, id="a retry of a template that tells the try"),
    ],
)
def test_a_result_is_handed_on_once(
    tmp_path: Path, got: tuple[int, int] | None, asks: tuple[int, int], arguments: str, again: bool
) -> None:
    from airflow_rankzero import delivery

    (tmp_path / "go").touch()
    first = launcher_of(tmp_path, 1).submit(train, str(tmp_path))
    value = first.result(60)
    if got:
        delivery.hand(first, try_of(*got))
    launcher = launcher_of(tmp_path, asks[0], arguments)
    settle(launcher, try_of(*asks))
    assert (launcher.take_up() is None) is again
    second = launcher.submit(train, str(tmp_path))
    assert (second.result(60) != value) is again
    assert second.submission == int(again)


def test_a_training_that_lives_is_taken_up_by_its_generation_and_ended_by_another(tmp_path: Path) -> None:
    handle = launcher_of(tmp_path, 1).submit(train, str(tmp_path))
    settle(launcher_of(tmp_path, 1), try_of(1, 2))
    assert launcher_of(tmp_path, 1).take_up() is not None
    assert not handle.status().final
    settle(launcher_of(tmp_path, 2), try_of(2, 2))
    assert handle.status().state == "cancelled"
    assert launcher_of(tmp_path, 2).take_up() is None


@pytest.mark.parametrize(
    ("generation", "arguments", "resumed"),
    [
        pytest.param(1, "same", True, id="a retry"),
        pytest.param(1, "other", True, id="a retry of a template that tells the try"),
        pytest.param(2, "same", True, id="cleared after a failure"),
        pytest.param(2, "other", False, id="cleared, and trained on something else"),
    ],
)
def test_a_failed_training_goes_on_unless_it_is_another_one(
    tmp_path: Path, generation: int, arguments: str, resumed: bool
) -> None:
    with pytest.raises(RankZeroError):
        launcher_of(tmp_path, 1).submit(train, str(tmp_path), fail=True).result(60)
    (tmp_path / "go").touch()
    launcher = launcher_of(tmp_path, generation, arguments)
    settle(launcher, try_of(generation, 2))
    assert (launcher.submit(train, str(tmp_path)).result(60) < 0) is resumed
