"""A run goes on from its last checkpoint after a loss, and ends at once after an error of the user's code."""

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import find

from rankzero import (
    CheckpointConfig,
    Launcher,
    ResultError,
    RetryableError,
    RunCancelledError,
    RunHandle,
    WorkerFailedError,
    store,
)
from rankzero.run.checkpoints import Manifest

WAIT = 90.0
STEPS = 6


def has_committed(attempt: int) -> bool:
    """True if the newest checkpoint is of this attempt, and of step 2 at least."""
    import rankzero.train as rt

    checkpoint = rt.get_checkpoint()
    try:
        state = checkpoint.load() if checkpoint else {"step": 0}
    except ResultError:
        # A newer one has taken its place this very moment.
        return False
    return bool(state["step"] >= 2 and state["starts"][-1][0] == attempt)


def train(failures: int, witness: str) -> list[list[int]]:
    """Adds up its steps; rank 1 fails from step 3 on in the first attempts. Returns the starts: (attempt, step)."""
    import torch
    import torch.distributed as dist

    import rankzero.train as rt

    dist.init_process_group("gloo")
    context = rt.get_context()
    checkpoint = rt.get_checkpoint()
    state: dict[str, Any] = checkpoint.load() if checkpoint else {"step": 0, "sum": torch.zeros(1), "starts": []}
    state["starts"] = [*state["starts"], [context.attempt, state["step"]]]
    while state["step"] < STEPS:
        addend = torch.ones(1)
        dist.all_reduce(addend)
        state = {"step": state["step"] + 1, "sum": state["sum"] + addend, "starts": state["starts"]}
        rt.report({"step": state["step"]}, checkpoint=state)
        healed = Path(f"{witness}-healed").exists()
        if state["step"] >= 3 and context.rank == 1 and context.attempt < failures and not healed:
            # These steps are shorter than a commit, which goes on beside them.
            while not has_committed(context.attempt):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
    Path(witness).write_text("done")
    assert state["sum"].item() == 2 * STEPS
    starts: list[list[int]] = state["starts"]
    return starts


def run(launcher: Launcher, function: Callable[..., Any], *args: Any) -> tuple[Any, RunHandle[Any]]:
    """The value and the run. By `run`: a detached driver would start a zygote of its own."""
    launcher = launcher.options(run_id="run")
    value = launcher.run(function, *args)
    handle = find(launcher)
    assert handle is not None
    return value, handle


def test_the_budget_ends_and_the_last_failure_is_raised(launcher: Launcher, tmp_path: Path) -> None:
    launcher = launcher.options(run_id="budget", max_restarts=1)
    with pytest.raises(WorkerFailedError) as caught:
        launcher.run(train, 9, str(tmp_path / "witness"))
    assert (caught.value.rank, caught.value.signal) == (1, "SIGKILL")
    handle = RunHandle.attach(tmp_path / "store" / "budget")
    assert handle.status().attempt == 1
    # The same training again: as an orchestrator's retry does, from the last checkpoint.
    (tmp_path / "witness-healed").touch()
    starts = launcher.run(train, 9, str(tmp_path / "witness"))
    assert [attempt for attempt, _ in starts] == [0, 1, 2]
    assert starts[-1][1] >= 2


def test_a_retry_under_way_can_be_cancelled(launcher: Launcher, tmp_path: Path) -> None:
    def fail() -> None:
        raise RetryableError("busy")

    handle = launcher.options(num_processes=1, max_restarts=9).submit(fail)
    # The third restart has a pause of some seconds.
    assert any(event.get("attempt") == 3 for event in handle.events(follow=True) if event["type"] == "restart")
    handle.cancel()
    assert handle.wait(WAIT)
    with pytest.raises(RunCancelledError):
        handle.result()


def test_every_rank_can_keep_a_part_of_its_own(launcher: Launcher) -> None:
    def shards() -> list[Any]:
        import torch

        import rankzero.train as rt

        context = rt.get_context()
        checkpoint = rt.get_checkpoint()
        if checkpoint is None:
            rt.report({}, checkpoint={"rank": context.rank, "shard": torch.arange(3) + context.rank}, sharded=True)
            print("reported", flush=True)
            while True:
                time.sleep(0.05)
                if (last := rt.get_checkpoint()) is not None:
                    raise RetryableError(f"{last.id} is committed")
        assert checkpoint.sharded
        return [checkpoint.load()["rank"] == context.rank, checkpoint.load(rank=1)["shard"].tolist()]

    assert launcher.options(max_restarts=1).run(shards) == [True, [1, 2, 3]]


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

    _, handle = run(launcher.options(num_processes=1, checkpoints=config), report)
    assert [manifest.index for manifest in handle.checkpoints()] == kept
    folders = os.listdir(handle.own.path("checkpoints"))
    assert sorted(folders) == [manifest.id for manifest in handle.checkpoints()]


def test_checkpoints_pass_through_the_channel_where_the_store_is_out_of_sight(launcher: Launcher) -> None:
    def far() -> list[Any]:
        import torch

        import rankzero.train as rt

        checkpoint = rt.get_checkpoint()
        if checkpoint is None:
            for index in range(5):
                rt.report({}, checkpoint={"index": index, "weights": torch.full((1_000_000,), float(index))})
            # Before that, a newer one may take the place of the one that is loaded.
            rt.context.await_checkpoint()
            assert rt.get_checkpoint().load()["index"] == 4
            raise RetryableError("again")
        state = checkpoint.load()
        return [state["index"], state["weights"].sum().item()]

    launcher = launcher.options(num_processes=1, max_restarts=1, store="memory://bucket/checkpoints", run_id="far")
    assert launcher.run(far) == [4, 4e6]
    handle = RunHandle.attach("memory://bucket/checkpoints/far")
    assert [manifest.index for manifest in handle.checkpoints()] == [3, 4]


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


FORMS = ("pieces", "directory")


def report_two(form: str) -> float:
    """Reports steps 0 and 1 and raises; with a checkpoint, returns the step from it."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    import rankzero.train as rt

    if checkpoint := rt.get_checkpoint():
        if form == "directory":
            with checkpoint.as_directory() as folder:
                return float(Path(folder, "step").read_text()[-1])
        return float(checkpoint.load()["weights"][0])
    for step in range(2):
        state: Any = {"weights": torch.full((1000,), float(step))}
        if form == "pieces":
            dist.is_initialized() or dist.init_process_group("gloo")
            mesh = init_device_mesh("cpu", (1,))
            state["weights"] = distribute_tensor(state["weights"], mesh, [Replicate()])
        elif form == "directory":
            state = tempfile.mkdtemp(dir=os.environ["RANKZERO_SCRATCH"])
            Path(state, "step").write_text(f"{step:1000}")
        rt.report({}, checkpoint=state)
        rt.context.await_checkpoint()
    raise ValueError("behind two checkpoints")


@pytest.mark.parametrize("form", ["state", *(pytest.param(form, marks=pytest.mark.soak) for form in FORMS)])
def test_a_checkpoint_that_a_rank_finds_damaged_is_not_used_again(launcher: Launcher, form: str) -> None:
    launcher = launcher.options(num_processes=1, run_id="run")
    with pytest.raises(WorkerFailedError, match="behind two checkpoints"):
        launcher.run(report_two, form)
    handle = find(launcher)
    assert handle
    newest = handle.checkpoints()[-1]
    file = store.join(newest.folder, newest.parts["0"]["file"])
    data = bytearray(store.read_bytes(file))
    data[len(data) // 2] ^= 1
    store.write_bytes(file, bytes(data))
    with pytest.raises(ResultError, match=f"checkpoint {newest.id} is damaged"):
        launcher.run(report_two, form)
    assert launcher.run(report_two, form) == 0.0
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
