"""A dataset that is many times as large as what its readers keep of it."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import rankzero.train as rt
from rankzero import Launcher
from rankzero.data import order

WIDTH = 16384  # Numbers of a row of 64 KiB

ROWS, GROUP = 4096, 8
SIZE = 4 * WIDTH * ROWS


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows that are full of their own number, as Spark's workers leave them."""
    path = tmp_path_factory.mktemp("table") / "rows.parquet"
    schema = pa.schema({"id": pa.int64(), "x": pa.list_(pa.float32(), WIDTH)})
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for low in range(0, ROWS, GROUP):
            ids = torch.arange(low, low + GROUP)
            rows = pa.array(ids.float().repeat_interleave(WIDTH).numpy())
            columns = [pa.array(ids.numpy()), pa.FixedSizeListArray.from_arrays(rows, WIDTH)]
            writer.write_table(pa.table(columns, schema=schema))
    return path


def anonymous() -> int:
    """Returns the bytes of this process that are no pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def read(how: str) -> tuple[list[int], int]:
    """Returns the rows of an epoch, and by how many bytes this rank was larger in it than before."""
    if how == "windowed":
        order.WINDOW = SIZE // 32
    ids: list[int] = []
    before = most = anonymous()
    for batch in rt.get_dataset_shard().iter_batches(32, shuffle=how == "windowed"):
        assert (batch["x"] == batch["id"][:, None]).all()
        ids += batch["id"].tolist()
        most = max(most, anonymous())
    return ids, most - before


@pytest.mark.parametrize("how", ["ordered", "windowed"])
def test_a_rank_keeps_a_part_of_its_dataset(launcher: Launcher, table: Path, how: str) -> None:
    ids, most = launcher.options(num_processes=1, dataset=table).run(read, how)
    assert sorted(ids) == list(range(ROWS))
    assert (ids == sorted(ids)) is (how == "ordered")
    assert most < SIZE / 2
