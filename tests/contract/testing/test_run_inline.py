"""`run_inline`: a rank in this thread, and nothing left behind."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest

import rankzero.train as rt
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


def test_the_rank_is_this_very_thread() -> None:
    SEEN.clear()
    run = run_inline(reduce, (1.0,), env={"GREETING": "hi"})
    assert (run.value["greeting"], run.value["sum"], run.value["world_size"]) == ("hi", 1.0, 1)
    assert [(row["rank"], row["sum"]) for row in run.metrics] == [(0, 1.0)]
    assert [(os.getpid(), threading.current_thread().name)] == SEEN
    # The object itself, neither pickled nor copied.
    assert run.value["object"] is SEEN


def train(epochs: int) -> int:
    import torch

    checkpoint = rt.get_checkpoint()
    first = int(checkpoint.load()["epoch"]) + 1 if checkpoint else 0
    for epoch in range(first, epochs):
        rt.report({"epoch": epoch}, checkpoint={"epoch": epoch, "weight": torch.full((3,), float(epoch))})
        rt.context.await_checkpoint()
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


def test_what_it_raises_comes_out_as_it_is() -> None:
    error = ValueError("no such lr")

    def fail() -> None:
        raise error

    with pytest.raises(ValueError, match="no such lr") as caught:
        run_inline(fail)
    assert caught.value is error


def test_a_result_that_a_script_would_set() -> None:
    assert run_inline(lambda: rt.set_result(3)).value == 3
