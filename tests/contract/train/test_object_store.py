"""A rank and the processes that it forks use an object store, whatever the rank's other threads do at that moment."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankzero import Launcher, ResultError, store
from rankzero.store import remote

WAIT = 90.0

FORK = """
import os, signal, sys, threading
from rankzero.store import remote

def in_child(function):
    child = os.fork()
    if not child:
        # The default action of the signal ends a child that is blocked.
        signal.alarm(20)
        try:
            function()
        finally:
            os._exit(0 if sys.exception() is None else 1)
    return os.waitpid(child, 0)[1]
"""


def script(text: str, *arguments: str) -> str:
    """Runs a program in a process of its own and returns its output."""
    done = subprocess.run(
        [sys.executable, "-c", FORK + text, *arguments], capture_output=True, text=True, timeout=WAIT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_child_imports_a_module_that_the_reader_thread_was_importing(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import begun, time\nbegun.event.set()\ntime.sleep(1)\n")
    (tmp_path / "begun.py").write_text("import threading\nevent = threading.Event()\n")
    text = """
sys.path.insert(0, sys.argv[1])
import begun
from rankzero.train.batches import ahead

def rows():
    yield 0
    import slow
    yield 1

items = ahead(rows(), 1)
next(items)
begun.event.wait(20)
items.close()
print(in_child(lambda: __import__("slow")))
"""
    assert script(text, str(tmp_path)) == "0\n"


def test_a_fork_waits_for_a_limited_time_and_its_child_refuses_new_clients() -> None:
    text = """
import os
from rankzero.host import forks

os.environ["RANKZERO_TIME_SCALE"] = "0.01"
entered, leave = threading.Event(), threading.Event()

def hold():
    with forks.held():
        entered.set()
        leave.wait()

def refused():
    try:
        remote.Client.of("s3://bucket/run")
    except RuntimeError as error:
        print(str(error).partition(" was forked ")[2], flush=True)

thread = threading.Thread(target=hold, daemon=True)
thread.start()
entered.wait(20)
print(in_child(refused))
leave.set()
thread.join()
print(in_child(forks.check))
"""
    refused = "while a request to an object store was in flight, which the fork awaited for 0.3 s"
    first, *rest = script(text).splitlines()
    assert first.startswith(refused)
    assert rest == ["0", "0"]


def evaluate() -> int:
    """Reports a checkpoint and, while it is uploaded, reads rows in the worker processes of a loader."""
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    import rankzero.train as rt

    shard = rt.get_dataset_shard()

    class Rows(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return shard.iter_batches(10, device="cpu", prefetch=0)

    seen = 0
    for epoch in range(2):
        rt.report({"epoch": epoch}, checkpoint={"weights": torch.zeros(4_000_000)})
        seen += sum(len(batch["x"]) for batch in DataLoader(Rows(), batch_size=None, num_workers=1))
    return seen


@pytest.mark.parametrize("is_local", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_workers_of_a_loader_read_rows_while_a_checkpoint_is_uploaded(
    bucket: str, tmp_path: Path, is_local: bool
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow import fs

    data = str(tmp_path / "rows") if is_local else f"{bucket}/rows"
    filesystem, path = (fs.LocalFileSystem(), data) if is_local else (remote.Client.of(data).filesystem, data[5:])
    filesystem.create_dir(path)
    for number in range(2):
        rows = pa.table({"x": list(range(100))})
        pq.write_table(rows, f"{path}/{number}.parquet", row_group_size=50, filesystem=filesystem)
    env = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    launcher = Launcher(1, dataset=data, store=f"{bucket}/runs", run_id="slow", env=env, timeout=WAIT)
    assert launcher.run(evaluate) == 400


@pytest.mark.parametrize("size", [10, 24 << 20])
def test_a_part_that_a_removed_directory_refuses_does_not_appear(bucket: str, size: int) -> None:
    client = remote.Client.of(bucket)

    def upload() -> None:
        with remote.Upload(client, f"{bucket}/rank-0") as file:
            file.write(bytes(size))
            raise ResultError("removed")

    with pytest.raises(ResultError, match="removed"):
        upload()
    gc.collect()
    assert store.list_files(bucket) == []
