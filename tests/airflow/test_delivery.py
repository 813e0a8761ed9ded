"""What an earlier run of a task instance is to a try: one of its own generation, or of one before a clear."""

from pathlib import Path
from typing import Any

import pytest

from rankzero import Launcher, RankZeroError
from rankzero.run import RunHandle

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


def launcher_of(tmp_path: Path, generation: str, arguments: str = "same") -> Launcher:
    labels = {"generation": generation, "arguments": arguments}
    return Launcher(1, store=tmp_path / "store", run_id="task", labels=labels)


def settle(launcher: Launcher) -> RunHandle[Any]:
    from airflow_rankzero import delivery

    before = launcher.find()
    assert before is not None
    delivery.settle(before, launcher.labels or {}, PATIENCE)
    return before


@pytest.mark.parametrize(
    ("handed_to", "asks", "again"),
    [
        pytest.param(None, "1", False, id="a try died before it could hand the result on"),
        pytest.param("1", "1", False, id="a try died while it handed the result on"),
        pytest.param(None, "2", False, id="cleared, but nobody had got the result"),
        pytest.param("1", "2", True, id="cleared after a success"),
    ],
)
def test_a_result_is_delivered_once(tmp_path: Path, handed_to: str | None, asks: str, again: bool) -> None:
    from airflow_rankzero import delivery

    (tmp_path / "go").touch()
    first = launcher_of(tmp_path, "1").submit(train, str(tmp_path))
    value = first.result(60)
    if handed_to:
        delivery.hand(first, handed_to)
    launcher = launcher_of(tmp_path, asks)
    settle(launcher)
    assert (launcher.take_up() is None) is again
    second = launcher.submit(train, str(tmp_path))
    assert (second.result(60) != value) is again
    assert second.submission == int(again)


def test_a_training_that_lives_is_taken_up_by_its_generation_and_ended_by_another(tmp_path: Path) -> None:
    handle = launcher_of(tmp_path, "1").submit(train, str(tmp_path))
    settle(launcher_of(tmp_path, "1"))
    taken = launcher_of(tmp_path, "1").take_up()
    assert taken is not None
    assert not handle.status().final
    settle(launcher_of(tmp_path, "2"))
    assert handle.status().state == "cancelled"
    assert launcher_of(tmp_path, "2").take_up() is None


@pytest.mark.parametrize(
    ("generation", "arguments", "resumed"),
    [
        pytest.param("1", "same", True, id="a retry"),
        pytest.param("1", "other", True, id="a retry of a template that tells the try"),
        pytest.param("2", "same", True, id="cleared after a failure"),
        pytest.param("2", "other", False, id="cleared, and trained on something else"),
    ],
)
def test_a_failed_training_goes_on_unless_it_is_another_one(
    tmp_path: Path, generation: str, arguments: str, resumed: bool
) -> None:
    with pytest.raises(RankZeroError):
        launcher_of(tmp_path, "1").submit(train, str(tmp_path), fail=True).result(60)
    (tmp_path / "go").touch()
    launcher = launcher_of(tmp_path, generation, arguments)
    settle(launcher)
    assert (launcher.submit(train, str(tmp_path)).result(60) < 0) is resumed
