"""Decoded groups of rows, where several tasks of a host need the same ones."""

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.conftest import until

from rankzero.data import reader
from rankzero.submit.paths import manifest_of_path
from rankzero.train import DatasetShard, TrainContext

HOLDER = """
import fcntl, sys, time
lock = open(sys.argv[1], "wb")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def tasks(tmp_path: Path) -> list[Path]:
    """Scratch directories, as those of tasks lie beside each other."""
    folders = [tmp_path / f"rankzero-agent-{name}" for name in "abc"]
    for folder in folders:
        folder.mkdir()
    return folders


def batch_of(number: int) -> Any:
    return pa.record_batch({"number": [number]})


def number_at(path: Path) -> int:
    return int(pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)["number"][0].as_py())


@contextlib.contextmanager
def decoding_elsewhere(path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that decodes a group, and does not come to an end with it."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, f"{path}.lock"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def in_thread(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


def test_tasks_decode_a_table_once_and_each_has_it_until_its_own_end(tmp_path: Path, tasks: list[Path]) -> None:
    source = tmp_path / "t.parquet"
    pq.write_table(pa.table({"id": range(1000)}), source, row_group_size=100)
    manifest = manifest_of_path(str(source), "train")

    def ids(task: Path) -> list[int]:
        shard = DatasetShard(manifest, TrainContext(), str(task), "train")
        return [row for batch in shard.iter_batches(64, shuffle=True) for row in batch["id"].tolist()]

    found = ids(tasks[1])
    source.unlink()
    # Before it in the alphabet, and behind it.
    assert ids(tasks[0]) == ids(tasks[2]) == found
    shutil.rmtree(tasks[1])
    assert ids(tasks[0]) == ids(tasks[2]) == found


@pytest.mark.parametrize(("one", "other"), [("a", "b"), ("b", "a")])
def test_a_group_that_another_task_decodes_is_waited_for(
    tmp_path: Path, tasks: list[Path], one: str, other: str
) -> None:
    first, second = (tmp_path / f"rankzero-agent-{name}" / "group.arrow" for name in (one, other))
    with decoding_elsewhere(first) as process:
        thread = in_thread(lambda: reader.place_decoded(str(second), lambda: batch_of(2)))
        until(second.with_name("group.arrow.lock").exists, 30.0, "the second task")
        with pa.ipc.new_file(str(first), batch_of(1).schema) as writer:
            writer.write_batch(batch_of(1))
        process.kill()
        thread.join()
    assert number_at(second) == 1


def test_one_whose_process_was_killed_meanwhile_is_decoded_here(tasks: list[Path]) -> None:
    first, second = (task / "group.arrow" for task in tasks[:2])
    with decoding_elsewhere(first) as process:
        thread = in_thread(lambda: reader.place_decoded(str(second), lambda: batch_of(2)))
        until(second.with_name("group.arrow.lock").exists, 30.0, "the second task")
        process.send_signal(signal.SIGKILL)
        thread.join()
    assert number_at(second) == 2


def test_one_whose_process_hangs_is_decoded_here(tasks: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.001")
    first, second = (task / "group.arrow" for task in tasks[:2])
    with decoding_elsewhere(first):
        assert reader.place_decoded(str(second), lambda: batch_of(2)) is None
    assert number_at(second) == 2


def test_a_group_that_a_dead_host_left_without_content_is_decoded_here(tasks: list[Path]) -> None:
    dead, alive = (task / "group.arrow" for task in tasks[:2])
    reader.place_decoded(str(dead), lambda: batch_of(1))
    dead.write_bytes(b"")
    assert reader.place_decoded(str(alive), lambda: batch_of(2)) is None
    assert number_at(alive) == 2


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_was_forked_while_a_group_was_decoded_holds_nobody_up(
    tasks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a worker of a `DataLoader` that is started while a thread reads ahead."""
    path, other = (task / "group.arrow" for task in tasks[:2])
    forked = list[int]()

    def decode() -> Any:
        if pid := os.fork():
            forked.append(pid)
            return batch_of(1)
        signal.pause()

    try:
        assert reader.place_decoded(str(path), decode) is None
        path.unlink()
        monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("the lock is held"))
        assert reader.place_decoded(str(other), lambda: batch_of(2)) is None
    finally:
        for pid in forked:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert number_at(other) == 2


def test_where_files_cannot_be_locked_groups_are_decoded_all_the_same(
    tasks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    path = tasks[0] / "group.arrow"
    assert reader.place_decoded(str(path), lambda: batch_of(1)) is None
    assert number_at(path) == 1


def test_a_group_behind_a_link_in_the_place_of_a_directory_is_not_taken(tmp_path: Path, tasks: list[Path]) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    reader.place_decoded(str(elsewhere / "group.arrow"), lambda: batch_of(1))
    (tmp_path / "rankzero-agent-link").symlink_to(elsewhere)
    assert reader.place_decoded(str(tasks[0] / "group.arrow"), lambda: batch_of(2)) is None
    assert number_at(tasks[0] / "group.arrow") == 2


def test_decoded_rows_take_at_most_half_of_a_tmpfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(total=20 << 30, free=9 << 30))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        assert reader.place_decoded(os.path.join(memory, "group.arrow"), lambda: batch_of(1)) == batch_of(1)
        assert not os.path.exists(os.path.join(memory, "group.arrow"))
    if not is_memory(str(tmp_path)):
        assert reader.place_decoded(str(tmp_path / "group.arrow"), lambda: batch_of(1)) is None


def is_memory(path: str) -> bool:
    done = subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True)
    return done.stdout.strip() == "tmpfs"
