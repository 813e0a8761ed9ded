"""Accelerate's `notebook_launcher`, and lines of `accelerate launch` and `deepspeed` where these are not installed.

tests/frameworks has the lines that their own parsers read.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rankzero import InvalidJobError, Launcher
from rankzero.compat.accelerate import notebook_launcher


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(3, store=tmp_path, max_restarts=2, env={"MODE": "quick"})


def found(name: str) -> dict[str, str | None]:
    return {"name": name, **{key: os.environ.get(key) for key in ("WORLD_SIZE", "ACCELERATE_MIXED_PRECISION", "MODE")}}


def test_the_function_of_a_notebook_runs_on_all_ranks_with_its_precision(launcher: Launcher) -> None:
    expected = {"name": "a", "WORLD_SIZE": "2", "ACCELERATE_MIXED_PRECISION": "bf16", "MODE": "quick"}
    assert notebook_launcher(found, ("a",), 2, "bf16", use_port="29501", launcher=launcher) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixed_precision": "fp4"}, "mixed_precision is 'fp4'; choose one of no, fp16, bf16, fp8"),
        ({"num_nodes": 2}, "num_nodes is 2 and node_rank is 0; one call starts the ranks of all nodes"),
        ({"num_nodes": 2, "node_rank": 1}, "node_rank is 1"),
        ({"num_processes": 0}, "num_processes is 0"),
        ({"args": "a"}, r"args is 'a'; give a tuple, such as \('a',\)"),
    ],
)
def test_what_means_something_else_is_refused(launcher: Launcher, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidJobError, match=message):
        notebook_launcher(found, **{"launcher": launcher, **options})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["-n", "2", "accelerate", "launch", "train.py"], "says how many ranks there are: leave out --num_processes"),
        (["--nnodes", "1", "deepspeed", "train.py"], "leave out --nnodes"),
        (["accelerate", "config"], "call accelerate itself for its other commands"),
        (["accelerate", "launch", "train.py"], "pip install accelerate"),
        (["deepspeed", "train.py"], "pip install deepspeed"),
    ],
)
def test_a_line_that_cannot_be_read_is_refused(line: list[str], message: str) -> None:
    package = message.partition("pip install ")[2]
    if package and importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    words = [] if line[0] == "accelerate" or line[0] == "deepspeed" else ["run"]
    done = subprocess.run(
        [sys.executable, "-m", "rankzero.cli", *words, *line], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
