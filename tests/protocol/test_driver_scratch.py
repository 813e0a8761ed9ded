"""The directory in which a driver has what is on its way to an object store."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankzero.driver.storage import scratch_directory
from rankzero.task.scratch import ABANDONED_AFTER, make_scratch, remove_abandoned

DRIVER = """
import sys
from rankzero.driver.storage import scratch_directory
with scratch_directory() as own:
    print(own, flush=True)
    sys.stdin.read()
"""


def driver() -> tuple[subprocess.Popen[str], Path]:
    """A process with such a directory, and a file in it."""
    process = subprocess.Popen([sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    path = Path(process.stdout.readline().strip())
    (path / "value").write_text("much")
    return process, path


def grow_old(path: Path) -> None:
    before = time.time() - 2 * ABANDONED_AFTER
    os.utime(path, (before, before))


def test_what_a_killed_driver_left_goes_with_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (killed, left), (living, used) = driver(), driver()
    try:
        killed.kill()
        killed.wait()
        for path in (left, used):
            grow_old(path)
        begun = Path(make_scratch(str(tmp_path), "rankzero-driver-"))
        with scratch_directory() as own:
            assert sorted(os.listdir(tmp_path)) == sorted([used.name, begun.name, os.path.basename(own)])
        assert (used / "value").exists()
        assert not os.path.exists(own)
    finally:
        for process in (killed, living):
            process.kill()
            process.communicate()


def test_the_directory_of_another_host_stays(tmp_path: Path) -> None:
    """On some file servers the lock of a living process does not hold here."""
    own = Path(make_scratch(str(tmp_path)))
    host = own.name.removeprefix("rankzero-agent-")[:8]
    left = tmp_path / f"rankzero-agent-{host}-12345678"
    elsewhere = tmp_path / f"rankzero-agent-{host[::-1]}x-12345678"
    of_a_user = tmp_path / "rankzero-agent-notes"
    for path in (left, elsewhere, of_a_user):
        path.mkdir()
    for path in tmp_path.iterdir():
        grow_old(path)
    remove_abandoned(str(tmp_path))
    assert sorted(tmp_path.iterdir()) == sorted([elsewhere, of_a_user])
