"""TensorBoard's event files, read by its own reader: `make test-frameworks`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.conftest import until

from rankzero import InvalidJobError, Launcher, WorkerFailedError, store
from rankzero.run.directory import EVENTS
from rankzero.tracking import TensorBoard


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """To import them takes seconds on a busy machine."""
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "6")


def fail_first(marker: str) -> float:
    import os

    import rankzero.train as rt

    for step in range(3):
        rt.report({"step": step, "loss": 1.0 / (step + 1), "accuracy": float("nan")})
    is_first = not os.path.exists(marker)
    if is_first:
        # Both fail; neither ends the other before its reports have arrived.
        context = rt.get_context()
        events, mine = (
            next(Path(str(context.storage_path)).glob(f"submissions/*/{EVENTS}")),
            f'"type": "metric", "rank": {context.rank},',
        )
        until(lambda: events.read_text().count(mine) == 3, 60, "this rank's reports")
    rt.barrier()
    if is_first:
        open(marker, "w").close()
        raise ValueError("no luck")
    return 0.5


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    found = accumulator(str(directory)).Reload()
    return {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


LOSS = [(0, 1.0), (1, 0.5), (2, pytest.approx(1 / 3))]


def test_tensorboard_reads_each_rank_once_however_often_the_training_was_resumed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="make test-frameworks")
    launcher = Launcher(2, store=tmp_path, run_id="one", trackers=[TensorBoard(ranks=None)])
    with pytest.raises(WorkerFailedError):
        launcher.run(fail_first, str(tmp_path / "marker"))
    folder = tmp_path / "one" / "tensorboard"
    assert scalars(folder / "rank-0")["loss"] == LOSS
    assert launcher.run(fail_first, str(tmp_path / "marker")) == 0.5
    for rank in range(2):
        found = scalars(folder / f"rank-{rank}")
        assert set(found) == {"loss", "accuracy"}
        # Of the first submission, and of the second.
        assert found["loss"] == LOSS + LOSS
        assert len(found["accuracy"]) == 6
    assert len(list(folder.rglob("*tfevents*"))) == 2


def test_tensorboards_files_of_the_training_before_stay(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="make test-frameworks")
    (tmp_path / "marker").touch()
    launcher = Launcher(1, store=tmp_path, run_id="one", trackers=[TensorBoard()])
    for version in ("1", "2"):
        launcher.options(code_version=version).run(fail_first, str(tmp_path / "marker"))
    for folder in (tmp_path / "one", tmp_path / "one" / "training-0001"):
        assert scalars(folder / "tensorboard" / "rank-0")["loss"] == LOSS


def test_tensorboards_files_lie_on_the_object_store_of_their_run(tmp_path: Path, bucket: str) -> None:
    pytest.importorskip("tensorboard", reason="make test-frameworks")
    (tmp_path / "marker").touch()
    launcher = Launcher(1, store=bucket, run_id="one", trackers=[TensorBoard()])
    launcher.run(fail_first, str(tmp_path / "marker"))
    folder = store.join(bucket, "one", "tensorboard", "rank-0")
    (name,) = store.list_names(folder)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / name).write_bytes(store.read_bytes(store.join(folder, name)))
    assert scalars(tmp_path / "copy")["loss"] == LOSS


def test_without_its_package_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "tensorboard", raising=False)
    with pytest.raises(InvalidJobError, match="needs tensorboard here: pip install tensorboard"):
        TensorBoard().check()
