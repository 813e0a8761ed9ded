"""A dataset of four times the memory that its readers may have."""

import contextlib
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
from tests.conftest import until

import rankzero.train as rt
from rankzero import Launcher
from rankzero.data import order

pytestmark = pytest.mark.soak

MOUNT = Path("/sys/fs/cgroup")

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


class Limited:
    """A group whose processes may take so much memory together, the cache of the files they read with it.

    Attributes:
        folder: What the kernel shows of it.
        limit: In bytes.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._first = (folder / "memory.limit_in_bytes").exists()
        (folder / ("memory.limit_in_bytes" if self._first else "memory.max")).write_text(str(limit))
        # No swap, where it is counted, that would hide what does not fit.
        with contextlib.suppress(OSError):
            (folder / ("memory.memsw.limit_in_bytes" if self._first else "memory.swap.max")).write_text(
                str(limit) if self._first else "0"
            )

    def anonymous(self) -> int:
        """Bytes that its processes have now, without those of files."""
        return self._facts("memory.stat")["rss" if self._first else "anon"]

    def killed(self) -> int:
        """Processes that were killed since there was no room."""
        return self._facts("memory.oom_control" if self._first else "memory.events")["oom_kill"]

    def was_full(self) -> bool:
        """Whether its processes ever had all that they may have, so that something had to give way."""
        if self._first:
            # It may stand just below: the kernel takes pages by the dozen.
            return int((self.folder / "memory.max_usage_in_bytes").read_text()) > 0.98 * self.limit
        return self._facts("memory.events")["max"] > 0

    def _facts(self, name: str) -> dict[str, int]:
        lines = (self.folder / name).read_text().splitlines()
        return {key: int(value) for key, value in (line.split() for line in lines)}


@contextlib.contextmanager
def limited(name: str, limit: int) -> Iterator[Limited]:
    """A group until the end of the block; skips the test where none can be made."""
    folder = _place() / name
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        try:
            group = Limited(folder, limit)
        except OSError as error:
            pytest.skip(f"no memory can be limited in a control group of this process: {error}")
        yield group
    finally:
        # Once all its processes have ended.
        until(lambda: _is_removed(folder), 30.0, f"the end of {folder}")


def _is_removed(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()


def _place() -> Path:
    """Where one may stand: below this process's own, of which the second version has only what lies beside it."""
    own: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path.lstrip("/")))
    if "memory" in own:
        return MOUNT / "memory" / own["memory"]
    beside = MOUNT / own.get("", "")
    return beside.parent if beside != MOUNT else beside
