"""What ranks say to each other, and the worlds in which a training file runs: rankzero, torchrun, plain python."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import ROOT

from rankzero import Launcher, WorkerFailedError


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(3, store=str(tmp_path / "runs"))


def test_objects_and_turns_of_three_ranks(launcher: Launcher, tmp_path: Path) -> None:
    def train(log: str) -> dict[str, Any]:
        import rankzero.train as rt

        rank = rt.get_context().rank
        found = {
            "gathered": rt.all_gather_object({"rank": rank}),
            "broadcast": rt.broadcast_object([rank, "x"], source=2),
            "zero": rt.all_gather_object(rt.on_rank_zero(lambda: "here")()),
        }
        with rt.rank_zero_first(), open(log, "a") as file:
            file.write(f"{rank}\n")
        rt.barrier()
        return found

    found = launcher.run(train, str(tmp_path / "log"))

    assert found == {
        "gathered": [{"rank": 0}, {"rank": 1}, {"rank": 2}],
        "broadcast": [2, "x"],
        "zero": ["here", None, None],
    }
    turns = (tmp_path / "log").read_text().split()
    assert turns[0] == "0", "the first rank of a host goes first"
    assert sorted(turns) == ["0", "1", "2"]


@pytest.mark.parametrize("backend", ["gloo", None])
def test_a_group_that_the_training_made_is_used(launcher: Launcher, backend: str | None) -> None:
    def train() -> bool:
        import torch.distributed as dist

        import rankzero.train as rt

        dist.init_process_group(backend)
        mine = dist.group.WORLD
        rt.barrier()
        assert rt.broadcast_object(rt.get_context().rank) == 0
        assert rt.all_gather_object(rt.get_context().rank) == [0, 1, 2]
        return dist.group.WORLD is mine

    assert launcher.run(train)


def test_without_a_backend_the_group_is_the_trainings_own(launcher: Launcher) -> None:
    def train() -> None:
        import rankzero.train as rt

        rt.barrier()

    with pytest.raises(WorkerFailedError, match="backend=None leaves the process group to the training function"):
        launcher.options(backend=None).run(train)


SCRIPT = """
    import rankzero.train as rt
    import torch, torch.distributed as dist

    context = rt.get_context()
    model = rt.prepare_model(torch.nn.Linear(2, 1))
    ranks = rt.all_gather_object(context.rank)
    if context.rank == 0:
        print("world", context.world_size, ranks, context.device, type(model).__name__)
    rt.report({"loss": 0.25})
    if dist.is_initialized():
        dist.destroy_process_group()  # torch's threads may abort an interpreter that ends with an open group
"""


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_the_same_file_under_rankzero_torchrun_and_python(
    tmp_path: Path, world_size: int, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    model = "Linear" if world_size == 1 else "DistributedDataParallel"
    expected = f"world {world_size} {list(range(world_size))} cpu {model}"

    handle = Launcher(world_size, store=str(tmp_path / "runs")).submit(str(script))
    handle.result()
    assert expected in "".join(handle.logs())
    assert [row["loss"] for row in handle.metrics()] == [0.25] * world_size

    command = [sys.executable, str(script)]
    if world_size > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "core"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("world", "report"))]
    assert lines == [expected, "report 1: loss=0.25"]
