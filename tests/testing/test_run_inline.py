"""`run_inline`: rank 0 in this thread, the others beside it, and nothing left behind."""

import contextlib
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conftest import until

import rankzero.train as rt
from rankzero import InvalidJobError, WorkerFailedError, bounds, testing
from rankzero.testing import run_inline
from rankzero.train import context

SEEN: list[Any] = []


def reduce(add: float) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    world = rt.get_context()
    dist.init_process_group("gloo")
    x = torch.tensor([world.rank + add])
    dist.all_reduce(x)
    rt.report({"sum": x.item()})
    SEEN.append((os.getpid(), threading.current_thread().name))
    greeting = os.environ.get("GREETING")
    return {"sum": x.item(), "world_size": dist.get_world_size(), "object": SEEN, "greeting": greeting}


def environment_now() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


@pytest.fixture(autouse=True)
def _nothing_is_left(marker: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    # Not by their parent: a JVM that other tests left starts Python daemons when it likes.
    monkeypatch.setenv("MARK", marker)
    environment, session = environment_now(), context._session
    yield
    assert environment_now() == environment
    assert context._session is session
    import torch.distributed as dist

    assert not dist.is_initialized()


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.soak)])
def test_ranks_meet_and_rank_0_is_this_very_thread(world_size: int) -> None:
    SEEN.clear()
    run = run_inline(reduce, (1.0,), world_size=world_size, env={"GREETING": "hi"})
    assert [value["greeting"] for value in run.values] == ["hi"] * world_size
    expected = sum(rank + 1.0 for rank in range(world_size))
    assert [value["sum"] for value in run.values] == [expected] * world_size
    assert [(row["rank"], row["sum"]) for row in sorted(run.metrics, key=lambda row: row["rank"])] == [
        (rank, expected) for rank in range(world_size)
    ]
    assert [(os.getpid(), threading.current_thread().name)] == SEEN
    # The object itself, neither pickled nor copied.
    assert run.value["object"] is SEEN


def train(epochs: int) -> int:
    import torch

    checkpoint = rt.get_checkpoint()
    first = int(checkpoint.load()["epoch"]) + 1 if checkpoint else 0
    for epoch in range(first, epochs):
        rt.report({"epoch": epoch}, checkpoint={"epoch": epoch, "weight": torch.full((3,), float(epoch))})
    return epochs - first


def test_checkpoints_are_real_and_a_run_goes_on_from_one() -> None:
    first = run_inline(train, (3,))
    assert first.checkpoint
    assert first.checkpoint.load()["weight"].tolist() == [2.0] * 3
    again = run_inline(train, (5,), checkpoint=first.checkpoint.load())
    assert (again.value, [row["epoch"] for row in again.metrics]) == (2, [3, 4])


def test_a_directory_is_a_checkpoint_too(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("hello")

    def read() -> str:
        checkpoint = rt.get_checkpoint()
        assert checkpoint
        with checkpoint.as_directory() as directory:
            return Path(directory, "words.txt").read_text()

    assert run_inline(read, checkpoint=tmp_path).value == "hello"


def test_what_rank_0_raises_comes_out_as_it_is() -> None:
    error = ValueError("no such lr")

    def fail() -> None:
        raise error

    with pytest.raises(ValueError, match="no such lr") as caught:
        run_inline(fail, world_size=2)
    assert caught.value is error


def fail_on_rank_1() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if rt.get_context().rank == 1:
        raise ValueError("rank 1 has no data")
    dist.all_reduce(torch.ones(1))


def leave_the_group_before_it_fails() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rt.barrier()
    if rt.get_context().rank == 1:
        dist.destroy_process_group()
        # Its peer hears of that first.
        time.sleep(0.3)
        raise ValueError("rank 1 has no data")
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    "function", [pytest.param(fail_on_rank_1, marks=pytest.mark.soak), leave_the_group_before_it_fails]
)
def test_the_first_cause_is_that_of_the_rank_that_failed_and_not_its_echo(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rank 1 may stand still before it says why it fails.
    monkeypatch.setattr(bounds, "CAUSE_WINDOW", 30.0)
    with pytest.raises(WorkerFailedError, match=r"rank 1 failed: ValueError: rank 1 has no data") as caught:
        run_inline(function, world_size=2)
    assert (caught.value.rank, caught.value.exception_type) == (1, "ValueError")
    assert function.__name__ in str(caught.value.traceback)


def fail_before_there_is_a_group() -> None:
    if rt.get_context().rank == 1:
        raise ValueError("rank 1 has no data")
    rt.barrier()


def come_when_the_others_have_failed() -> None:
    if rt.get_context().rank == 1:
        raise ValueError("rank 1 has no data")
    for child in psutil.Process().children():
        # Not the children of other tests in this process: a JVM, a warm server.
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("rankzero.testing.rank" in word for word in child.cmdline()):
                child.wait(60)
    time.sleep(1)
    rt.barrier()


def wait_for_a_rank_that_waits() -> None:
    import torch
    import torch.distributed as dist

    rt.barrier()
    if rt.get_context().rank == 1:
        raise ValueError("rank 1 has no data")
    if rt.get_context().rank == 2:
        time.sleep(600)
    dist.recv(torch.ones(1), 2)


# Where rank 0 is not freed, it waits where no signal is heard.
@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize(
    ("function", "world_size"),
    [
        (fail_before_there_is_a_group, 3),
        pytest.param(come_when_the_others_have_failed, 2, marks=pytest.mark.soak),
        (wait_for_a_rank_that_waits, 3),
    ],
)
def test_rank_0_does_not_wait_for_ranks_that_have_failed(function: Any, world_size: int) -> None:
    with pytest.raises(WorkerFailedError, match=r"rank 1 failed: ValueError: rank 1 has no data"):
        run_inline(function, world_size=world_size)


def be_killed() -> None:
    if rt.get_context().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    rt.barrier()


@pytest.mark.timeout(120, method="thread")
def test_rank_0_does_not_wait_for_a_rank_that_was_killed() -> None:
    with pytest.raises(WorkerFailedError, match="rank 1 ended with code -9") as caught:
        run_inline(be_killed, world_size=2)
    assert (caught.value.rank, caught.value.exit_code) == (1, -9)
    # The group that could not be made does not disturb the next one.
    assert run_inline(reduce, (0.0,), world_size=2).value["sum"] == 1.0


def die_with_a_checkpoint_open() -> None:
    checkpoint = rt.get_checkpoint()
    assert checkpoint
    if rt.get_context().rank == 1:
        with checkpoint.as_directory():
            os.kill(os.getpid(), signal.SIGKILL)
    rt.barrier()


def test_a_rank_that_was_killed_leaves_no_files_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, temporary = tmp_path / "checkpoint", tmp_path / "temporary"
    checkpoint.mkdir()
    temporary.mkdir()
    (checkpoint / "weights").write_text("7")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with pytest.raises(WorkerFailedError, match="rank 1 ended with code -9"):
        run_inline(die_with_a_checkpoint_open, world_size=2, checkpoint=str(checkpoint), env={"TMPDIR": str(temporary)})
    assert list(temporary.iterdir()) == []


def fail_once_it_may() -> None:
    until(lambda: Path(os.environ["MAY_FAIL"]).exists(), 60, "the first read of rank 1's failure")
    if rt.get_context().rank == 1:
        raise ValueError("rank 1 has no data")


def test_a_rank_that_fails_while_its_failure_is_read_has_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, may_fail = testing.rank.read_failure, tmp_path / "may-fail"

    def is_rank(child: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return str(may_fail) in child.environ().values()
        return False

    def read_and_lose_the_processor(home: str, rank: int) -> Any:
        found = read(home, rank)
        if not may_fail.exists():
            (process,) = (child for child in psutil.Process().children() if is_rank(child))
            may_fail.touch()
            # Leaves the exit status to `run_inline`.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        return found

    monkeypatch.setattr(testing.rank, "read_failure", read_and_lose_the_processor)
    with pytest.raises(WorkerFailedError, match=r"rank 1 failed: ValueError: rank 1 has no data"):
        run_inline(fail_once_it_may, world_size=2, env={"MAY_FAIL": str(may_fail)})


def test_a_result_that_a_script_would_set() -> None:
    assert run_inline(lambda: rt.set_result(3)).value == 3


@pytest.mark.parametrize("world_size", [0, -1, 1.5, True, "2"])
def test_a_world_size_that_is_none(world_size: Any) -> None:
    with pytest.raises(InvalidJobError, match="world_size is"):
        run_inline(lambda: None, world_size=world_size)


def test_no_rank_awaits_a_checkpoint_without_a_driver() -> None:
    def train() -> str:
        rt.report({}, checkpoint={"step": 1})
        rt.await_checkpoint()
        return "done"

    assert run_inline(train, world_size=2).values == ["done", "done"]
