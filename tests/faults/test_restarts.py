"""A run goes on from its last checkpoint after a loss, and ends at once after an error of the user's code."""

import os
import signal
import time
from pathlib import Path

import pytest
from tests.conftest import find

from rankzero import (
    CheckpointConfig,
    Launcher,
    ResultError,
    RetryableError,
    RunCancelledError,
    WorkerFailedError,
    store,
)
from rankzero.run.checkpoints import Manifest

WAIT = 90.0


def test_the_budget_ends_and_the_last_failure_is_raised(launcher: Launcher) -> None:
    launcher = launcher.options(num_processes=1, run_id="budget", max_restarts=2)
    with pytest.raises(WorkerFailedError) as caught:
        launcher.run(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert (caught.value.rank, caught.value.signal) == (0, "SIGKILL")
    handle = find(launcher)
    assert handle
    assert handle.status().attempt == 2


def test_a_retry_under_way_can_be_cancelled(launcher: Launcher) -> None:
    def fail() -> None:
        raise RetryableError("busy")

    handle = launcher.options(num_processes=1, max_restarts=9).submit(fail)
    # The third restart has a pause of some seconds.
    assert any(event.get("attempt") == 3 for event in handle.events(follow=True) if event["type"] == "restart")
    handle.cancel()
    assert handle.wait(WAIT)
    with pytest.raises(RunCancelledError):
        handle.result()


def test_a_directory_is_a_checkpoint_too(launcher: Launcher, tmp_path: Path) -> None:
    def save(directory: str) -> list[str]:
        import rankzero.train as rt

        checkpoint = rt.get_checkpoint()
        if checkpoint is None:
            (Path(directory) / "sub").mkdir(parents=True)
            (Path(directory) / "sub" / "weights.txt").write_text("1 2 3")
            rt.report({"loss": 1.0}, checkpoint=directory)
            # What happens to the directory later is no part of the checkpoint.
            (Path(directory) / "sub" / "weights.txt").write_text("overwritten")
            while rt.get_checkpoint() is None:
                time.sleep(0.02)
            raise RetryableError("now from the checkpoint")
        with checkpoint.as_directory() as copy:
            first = (Path(copy) / "sub" / "weights.txt").read_text()
        second = Path(checkpoint.to_directory(str(Path(directory) / "copy"))) / "sub" / "weights.txt"
        return [first, second.read_text(), str(os.path.exists(copy))]

    launcher = launcher.options(num_processes=1, max_restarts=1)
    assert launcher.run(save, str(tmp_path / "mine")) == ["1 2 3", "1 2 3", "False"]


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (CheckpointConfig(num_to_keep=2), [4, 5]),
        (CheckpointConfig(num_to_keep=None), [0, 1, 2, 3, 4, 5]),
        (CheckpointConfig(num_to_keep=2, metric="loss"), [1, 3, 5]),
        (CheckpointConfig(num_to_keep=1, metric="loss", mode="max"), [0, 5]),
    ],
)
def test_the_newest_or_the_best_are_kept(launcher: Launcher, config: CheckpointConfig, kept: list[int]) -> None:
    def report() -> None:
        import rankzero.train as rt

        for index, loss in enumerate([9.0, 1.0, 5.0, 2.0, float("nan"), 4.0]):
            rt.report({"loss": loss}, checkpoint={"index": index})

    launcher = launcher.options(num_processes=1, checkpoints=config, run_id="run")
    launcher.run(report)
    handle = find(launcher)
    assert handle
    assert [manifest.index for manifest in handle.checkpoints()] == kept
    folders = os.listdir(handle.own.path("checkpoints"))
    assert sorted(folders) == [manifest.id for manifest in handle.checkpoints()]


def test_a_part_of_another_rank_is_found_where_the_store_is_out_of_sight(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if every rank had a task of its own: of the others' parts none is told.
    of_task = Manifest.for_ranks
    monkeypatch.setattr(Manifest, "for_ranks", lambda manifest, ranks: of_task(manifest, []))

    def shards() -> list[int]:
        import rankzero.train as rt

        rank, checkpoint = rt.get_context().rank, rt.get_checkpoint()
        if checkpoint is None:
            rt.report({}, checkpoint={"rank": rank}, sharded=True)
            while rt.get_checkpoint() is None:
                time.sleep(0.02)
            raise RetryableError("again")
        return [checkpoint.load()["rank"], *(checkpoint.load(rank=other)["rank"] for other in (2, 1))]

    launcher = launcher.options(num_processes=3, max_restarts=1, store="memory://bucket/apart", run_id="apart")
    assert launcher.run(shards) == [0, 2, 1]


def report_two() -> float:
    """Reports steps 0 and 1 and raises; with a checkpoint, returns the step from it."""
    import torch

    import rankzero.train as rt

    if checkpoint := rt.get_checkpoint():
        return float(checkpoint.load()["weights"][0])
    for step in range(2):
        rt.report({}, checkpoint={"weights": torch.full((1000,), float(step))})
        rt.context.await_checkpoint()
    raise ValueError("behind two checkpoints")


def test_a_checkpoint_that_a_rank_finds_damaged_is_not_used_again(launcher: Launcher) -> None:
    launcher = launcher.options(num_processes=1, run_id="run")
    with pytest.raises(WorkerFailedError, match="behind two checkpoints"):
        launcher.run(report_two)
    handle = find(launcher)
    assert handle
    newest = handle.checkpoints()[-1]
    file = store.join(newest.folder, newest.parts["0"]["file"])
    data = bytearray(store.read_bytes(file))
    data[len(data) // 2] ^= 1
    store.write_bytes(file, bytes(data))
    with pytest.raises(ResultError, match=f"checkpoint {newest.id} is damaged"):
        launcher.run(report_two)
    assert launcher.run(report_two) == 0.0
    assert newest.id in {manifest.id for manifest in handle.checkpoints()}, "it is not deleted"


@pytest.mark.parametrize(
    ("bad", "message"),
    [("/no/such/dir", "there is no such directory"), ([1], "give a directory or a dict"), (3, "give a directory")],
)
def test_what_is_no_checkpoint_is_refused(launcher: Launcher, bad: object, message: str) -> None:
    def report() -> None:
        import rankzero.train as rt

        rt.report({}, checkpoint=bad)

    with pytest.raises(WorkerFailedError, match=message) as caught:
        launcher.options(num_processes=1).run(report)
    assert caught.value.exception_type == "TypeError"
