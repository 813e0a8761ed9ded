"""A wrong argument to the training function is a type error, before anything runs."""

import subprocess
import sys
import zlib
from pathlib import Path

import pytest

PROGRAM = """
from rankzero import Launcher, RunHandle

def train(lr: float, *, steps: int = 1) -> dict[str, float]:
    return {"loss": lr * steps}

launcher = Launcher(2)
value: dict[str, float] = launcher.run(train, 0.1, steps=3)
handle: RunHandle[dict[str, float]] = launcher.submit(train, 0.1)
again: dict[str, float] = handle.result()
script: int = launcher.run("train.py", "--lr", 0.1)
launcher.run(train, "fast")
launcher.run(train, 0.1, step=3)
wrong: int = launcher.run(train, 0.1)
launcher.submit(train)
Launcher(2, use_gpus=True)
Launcher(2, timeout="soon")
launcher.timeout = 3.0
"""

DAG_FILE = """
from airflow_rankzero import torch_distributor

@torch_distributor(num_processes=2, retries=3, conn_id="spark", outlets=[])
def train(lr: float, *, steps: int = 1) -> dict[str, float]:
    return {"loss": lr * steps}

@torch_distributor
def plain(lr: float) -> float:
    return lr

train(0.1, steps=3)
train.override(task_id="again")(0.1)
train.partial(steps=2).expand(lr=[0.1, 0.2])
plain(0.1)
train("fast")
train(0.1, step=3)
plain()
"""

OPERATOR = """
from airflow_rankzero import TorchDistributorOperator

TorchDistributorOperator(task_id="a", train=print, num_processes="{{ params.n }}", timeout="{{ 5 }}", retries=2)
TorchDistributorOperator(task_id="b", train=print, num_processes=(2, 8), use_gpu=None, log_ranks=[0])
TorchDistributorOperator(task_id="c", train=print, stop_grace="{{ 5 }}")
TorchDistributorOperator(task_id="d", train=print, use_gpu="yes")
"""

RESOURCE = """
from dagster_rankzero import TorchDistributorResource

class Ours(TorchDistributorResource):
    team: str = "vision"

TorchDistributorResource(master="yarn", num_processes=4, timeout=3.0, env={"A": "b"})
Ours(team="audio", num_processes=2, store="s3://bucket/runs")
TorchDistributorResource(num_proceses=4)
TorchDistributorResource(timeout="soon")
Ours(stop_grace=None)
"""

DECORATED = """
from rankzero import distributed

@distributed(num_processes=2, timeout=3.0)
def train(lr: float, *, steps: int = 1) -> dict[str, float]:
    return {"loss": lr * steps}

value: dict[str, float] = train(0.1, steps=3)
other: dict[str, float] = train.options(num_processes=4)(0.1)
plain: dict[str, float] = train.local(0.1)
train("fast")
train(0.1, step=3)
wrong: int = train(0.1)
train.local()
distributed(num_proceses=2)
"""

PROGRAMS = {
    "distributed": (DECORATED, 'train("fast")', [0, 1, 2, 3, 4]),
    "launcher": (PROGRAM, 'run(train, "fast")', [0, 1, 2, 3, 4, 5, 6]),
    "decorator": (DAG_FILE, 'train("fast")', [0, 1, 2]),
    "operator": (OPERATOR, 'task_id="c"', [0, 1]),
    "resource": (RESOURCE, "(num_proceses=4)", [0, 1, 2]),
}
"""A program, its first wrong line, and the wrong lines counted from there."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What mypy says of all programs: reading what they import is what takes time."""
    directory = tmp_path_factory.mktemp("programs")
    paths = []
    for program, _, _ in PROGRAMS.values():
        paths.append(directory / file_name(program))
        paths[-1].write_text(program)
    root = Path(__file__).parents[2]
    options = ["--config-file", str(root / "pyproject.toml"), "--cache-dir", str(root / ".mypy_cache")]
    # In a process of its own, which exits without freeing what it has read: with an empty cache that takes a minute.
    checked = subprocess.run([sys.executable, "-m", "mypy", *options, *paths], capture_output=True, text=True)
    assert not checked.stderr
    return checked.stdout


def file_name(program: str) -> str:
    # mypy keeps what it knows of a module by its name.
    return f"program_{zlib.crc32(program.encode())}.py"


@pytest.mark.parametrize("name", PROGRAMS)
def test_arguments_and_values_are_checked(report: str, name: str) -> None:
    program, first_wrong, wrong = PROGRAMS[name]
    errors = [line.split(":") for line in report.splitlines() if ": error:" in line]
    # By its name: what mypy remembers of an earlier run has that run's directory.
    found = {int(number) for file, number, *_ in errors if Path(file).name == file_name(program)}
    first = next(number for number, line in enumerate(program.splitlines(), 1) if first_wrong in line)
    assert found == {first + offset for offset in wrong}, report
