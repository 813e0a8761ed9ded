"""TensorBoard's event files and W&B's offline runs, read by their own readers: `make test-frameworks`."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import until

from rankzero import InvalidJobError, Launcher, WorkerFailedError, store
from rankzero.run.names import EVENTS
from rankzero.tracking import TensorBoard, WandB
from rankzero.tracking.tracker import Folder


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """To import them takes seconds on a busy machine."""
    monkeypatch.setattr("rankzero.bounds.TRACKERS_TIMEOUT", 60.0)


def fail_first(marker: str) -> float:
    import os

    import rankzero.train as rt

    for step in range(3):
        rt.report({"step": step, "loss": 1.0 / (step + 1), "accuracy": float("nan")})
    is_first = not os.path.exists(marker)
    if is_first:
        # Both fail; neither ends the other before its reports have arrived.
        context = rt.get_context()
        events, mine = Path(str(context.storage_path), EVENTS), f'"type": "metric", "rank": {context.rank},'
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


def history(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of an offline run: W&B's messages in records of LevelDB's log format, behind seven bytes."""
    import json

    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record, whole = Record.FromString(whole), b""
            if record.HasField("history"):
                yield {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }


def test_an_offline_run_of_wandb(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    wandb = pytest.importorskip("wandb", reason="make test-frameworks")
    # Its service is this process's, with which it would end.
    request.addfinalizer(wandb.teardown)
    (tmp_path / "marker").touch()
    launcher = Launcher(1, store=tmp_path, run_id="one", trackers=[WandB("digits")], labels={"dag": "digits"})
    launcher.run(fail_first, str(tmp_path / "marker"))
    (path,) = (tmp_path / "one" / "wandb").rglob("*.wandb")
    rows = list(history(path))
    assert [(row["step"], row["loss"]) for row in rows] == LOSS


def test_an_offline_run_of_wandb_is_whole_when_it_is_uploaded(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B's service writes the end of the file after `finish` has returned, and often before anybody can look."""
    wandb = pytest.importorskip("wandb", reason="make test-frameworks")
    request.addfinalizer(wandb.teardown)
    uploaded, close = [], Folder.close

    def note(folder: Folder) -> None:
        (path,) = Path(folder.path).rglob("*.wandb")
        uploaded.append(len(list(history(path))))
        close(folder)

    monkeypatch.setattr(Folder, "close", note)

    def report(steps: int) -> None:
        import rankzero.train as rt

        for step in range(steps):
            rt.report({"step": step, "loss": 0.5})

    # The last one has several blocks.
    lengths = [1, 2, 3, 4, 1000]
    for steps in lengths:
        Launcher(1, store=tmp_path, trackers=[WandB("digits")]).run(report, steps)
    assert uploaded == lengths


def test_without_their_packages_they_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("tensorboard", "wandb"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for tracker, name in ((TensorBoard(), "tensorboard"), (WandB(), "wandb")):
        with pytest.raises(InvalidJobError, match=f"needs {name}: pip install 'rankzero.{name}.'"):
            tracker.check()
