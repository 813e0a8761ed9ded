"""The benchmarks whose size can be chosen run to their end with a small one: what they measure changes under them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
TIMEOUT = 540.0


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("own_zygotes")
@pytest.mark.parametrize("command", ["control_plane.py 16", "data.py 20", "connect.py 1", "steps.py 1", "imports.py"])
def test_it_measures(command: str) -> None:
    name, *size = command.split()
    done = subprocess.run(
        [sys.executable, str(FOLDER / name), *size],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "| measured | target | met |" in done.stdout
