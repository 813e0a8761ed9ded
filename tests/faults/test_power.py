"""The power fails: what was committed is there when it is back. A disk of its own forgets what nobody made durable."""

import fcntl
import os
import signal
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import processes_with, until
from tests.faults import kit
from tests.faults.trainings import HOLD_AT, STEPS, expected, train
from tests.runs import submitted

from rankzero import CheckpointConfig, Launcher, RunHandle, store
from rankzero.channel.messages import Finished, Part
from rankzero.driver.ending import Facts
from rankzero.driver.storage import Storage
from rankzero.run.checkpoints import Manifest

WAIT = 120.0

EXT4_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2  # As when the power fails: the journal, too, is as it stands on the disk


class Disk:
    """A file system in a file. Nothing but an fsync writes anything to it while a test lasts."""

    def __init__(self, image: Path, path: Path) -> None:
        self.path = path
        self._image = image
        path.mkdir()
        with open(image, "wb") as file:
            file.truncate(64 << 20)
        self._run("mkfs.ext4", "-q", "-F", str(image))
        self.mount()

    def mount(self) -> None:
        # ext4 would guess what was meant by a rename without an fsync; xfs and others do not.
        self._run("mount", "-o", "loop,noauto_da_alloc,commit=3600", str(self._image), str(self.path))

    def unmount(self) -> None:
        # A process that was killed holds its log for a moment longer.
        until(lambda: subprocess.run(["umount", self.path], capture_output=True).returncode == 0, WAIT, "a quiet disk")

    def fail(self) -> None:
        """Loses all that is not durable."""
        descriptor = os.open(self.path, os.O_RDONLY)
        fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        os.close(descriptor)
        # A mount namespace that another test makes meanwhile has this mount, too, and keeps the failed file system.
        until(self._comes_back, WAIT, "a disk that works")

    def _comes_back(self) -> bool:
        self.unmount()
        self.mount()
        try:
            (self.path / "probe").touch()
            (self.path / "probe").unlink()
        except OSError:
            return False
        return True

    @staticmethod
    def _run(*command: str) -> None:
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("a disk of its own needs mkfs.ext4 and the right to mount")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path / "image", tmp_path / "disk")
    yield made
    # Whatever may still be there: no later test shall find it.
    subprocess.run(["umount", "-l", made.path], check=True)


def test_checkpoints_and_the_result_outlive_a_power_failure(
    launcher: Launcher, tmp_path: Path, marker: str, disk: Disk
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    launcher = launcher.options(num_processes=1, store=disk.path / "runs", run_id="run")
    handle = launcher.submit(train, str(folder), "training")
    until(lambda: kit.arrival(folder, "training"), WAIT, "a rank")
    until(lambda: kit.newest_step(handle) == HOLD_AT - 1, WAIT, "its last checkpoint")
    driver = handle.status().driver_pid
    assert driver
    os.kill(driver, signal.SIGKILL)
    until(lambda: processes_with(marker) == [], WAIT, "the end of its processes")
    disk.fail()

    again = launcher.submit(train, str(folder), "training")
    assert again.job.submission == 1
    value = again.result(WAIT)
    assert (value["value"], value["history"]) == (expected(STEPS, 1), [[0, 0], [1, HOLD_AT]])
    until(lambda: processes_with(marker) == [], WAIT, "the end of its processes")
    disk.fail()

    assert RunHandle.attach(handle.directory).result(0) == value
    assert launcher.submit(train, str(folder), "training").result(0) == value


def test_what_came_over_the_channel_outlives_a_power_failure(disk: Disk) -> None:
    run, data = submitted(str(disk.path / "run")), b"1" * 100_000
    storage = Storage(run, 0, CheckpointConfig(), Facts(1, run.directory), run.path("result"))

    # As the driver's end of the channel does, which leaves durability to the driver.
    Path(run.path("result", ".upload-0-part")).write_bytes(data)
    storage.add_part(
        0,
        Part(
            id="0000-000000",
            index=0,
            file="rank-0.json",
            format="json",
            size=len(data),
            sha256="digest",
            sharded=False,
            metrics={},
            time=0.0,
            upload="0-part",
        ),
    )
    until(lambda: not storage.is_busy, WAIT, "the commit")
    assert [type(settled) for settled in storage.settled()] == [Manifest]
    Path(run.path("result", ".upload-value")).write_bytes(data)
    value = {"path": "", "upload": "value", "format": "json", "size": len(data), "digest": "digest", "summary": {}}
    storage.finish(0, Finished(0.0, value), {})
    until(lambda: list(storage.settled()) or storage.facts.success or storage.facts.refusal, WAIT, "the value")
    assert storage.facts.success
    store.write_bytes(run.path("status.json"), b"{}", durable=True)
    storage.close(WAIT)
    disk.fail()

    for path in (run.path("checkpoints", "0000-000000", "rank-0.json"), run.path("result", "value-0.json")):
        assert Path(path).read_bytes() == data, path
