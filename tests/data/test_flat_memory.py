"""A dataset of four times the memory that its readers may have."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.data.limited import limited

import rankzero.train as rt
from rankzero import Launcher
from rankzero.data import order

pytestmark = pytest.mark.soak

LIMIT = 512 << 20
WIDTH = 16384
"""Numbers of a row: 64 KiB, since the kernel reads about twice that around each page that it needs."""

SIZE = 4 * LIMIT
ROWS = SIZE // (4 * WIDTH)
GROUP = 8
FILES = 4
WINDOW = 16 << 20
"""Of a shuffle, in proportion: each rank has one, and while it is put together twice as much."""


@pytest.fixture(scope="module")
def table() -> Iterator[Path]:
    """Rows of 64 KiB, each full of its own number, as Spark's workers leave them."""
    # On a disk: what is in memory anyway is not read, and is charged to the process that has written it.
    folder = Path(tempfile.mkdtemp(prefix="rankzero-table-", dir="/var/tmp"))
    schema = pa.schema({"id": pa.int64(), "x": pa.list_(pa.float32(), WIDTH)})
    for number in range(FILES):
        with pq.ParquetWriter(folder / f"{number}.parquet", schema, compression="none", use_dictionary=False) as writer:
            first = number * ROWS // FILES
            for low in range(first, first + ROWS // FILES, GROUP):
                ids = torch.arange(low, low + GROUP)
                rows = pa.array(ids.float().repeat_interleave(WIDTH).numpy())
                columns = [pa.array(ids.numpy()), pa.FixedSizeListArray.from_arrays(rows, WIDTH)]
                writer.write_table(pa.table(columns, schema=schema))
    yield folder
    shutil.rmtree(folder)


def read(group: str, table: str, folder: str, how: str) -> None:
    """What this rank saw of an epoch, as a file."""
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
    if how == "windowed":
        order.WINDOW = WINDOW
    if os.environ["RANK"] == "0":
        drop_cache(table)
    rt.barrier()
    shard, ids, before = rt.get_dataset_shard(), [], bytes_read()
    for batch in shard.iter_batches(32, shuffle=how != "ordered"):
        assert (batch["x"] == batch["id"][:, None]).all()
        ids += batch["id"].tolist()
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps([ids, bytes_read() - before]))
    # What the other one takes is seen while both are there.
    rt.barrier()


def bytes_read() -> int:
    """What the disk has read for this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def drop_cache(table: str) -> None:
    """What stays in the page cache is charged to whoever has read or written it: it shall be the ranks."""
    for file in Path(table).iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


@pytest.mark.parametrize("how", ["ordered", "windowed"])
def test_ranks_read_four_times_their_memory(launcher: Launcher, table: Path, tmp_path: Path, how: str) -> None:
    with limited(f"rankzero-{os.getpid()}-{how}", LIMIT) as group:
        handle = launcher.options(dataset=str(table)).submit(read, str(group.folder), str(table), str(tmp_path), how)
        most = 0
        while not handle.wait(0.01):
            most = max(most, group.anonymous())
        handle.result(0)
        assert group.killed() == 0
        # The files did not fit, and gave way.
        assert group.was_full()
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    (first, _), (second, _) = found
    volume = sum(read for _, read in found)
    assert sorted(first + second) == list(range(ROWS))
    assert (first + second == list(range(ROWS))) is (how == "ordered")
    print(f"{how}: {most >> 20} MiB of anonymous memory at most, {SIZE >> 20} MiB of rows, {volume >> 20} MiB read")
    assert most < SIZE / 5
    # Each row about once: what the kernel reads beside it is not a multiple of the table.
    assert volume < 4 * SIZE
