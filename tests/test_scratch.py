"""The directory in which a driver has what is on its way to an object store."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankzero.driver.scratch import NEW, Scratch

DRIVER = "import sys; from rankzero.driver.scratch import Scratch; print(Scratch().path, flush=True); sys.stdin.read()"


def driver() -> tuple[subprocess.Popen[str], Path]:
    """A process with such a directory, and a file in it."""
    process = subprocess.Popen([sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    path = Path(process.stdout.readline().strip())
    (path / "value").write_text("much")
    return process, path


def grow_old(path: Path) -> None:
    before = time.time() - 2 * NEW
    os.utime(path, (before, before))


def test_what_a_killed_driver_left_goes_with_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (killed, left), (living, used) = driver(), driver()
    try:
        killed.kill()
        killed.wait()
        for path in (left, used):
            grow_old(path)
        begun = tmp_path / "rankzero-driver-not-yet-locked"
        begun.mkdir()
        own = Scratch()
        assert sorted(os.listdir(tmp_path)) == sorted([used.name, begun.name, os.path.basename(own.path)])
        own.remove()
        assert (used / "value").exists()
        assert not os.path.exists(own.path)
    finally:
        for process in (killed, living):
            process.kill()
            process.communicate()
