"""Rows of a Spark DataFrame to the ranks: beside pyspark's loader, Petastorm, Ray Data, and pyarrow alone.

Run: ``python benchmarks/data.py [thousands of rows]``.
"""

import glob
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from measure import Report

import rankzero.train as rt
from rankzero import Launcher, SparkEngine

THOUSANDS = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 2000
COLUMNS = 8
BATCH = 1024
RUNS = 3
PYSPARK_ROWS = 100_000
"""pyspark's loader is measured on fewer: it takes seconds for them."""


def touch(batch: Any) -> float:
    """A consumer that reads every number once."""
    return sum(float(column.sum()) for column in (batch.values() if isinstance(batch, dict) else batch))


def rate(shuffle: bool) -> float:
    """Rows per second of a rank in one epoch."""
    shard = rt.get_dataset_shard()
    started, rows = time.perf_counter(), 0
    for batch in shard.iter_batches(BATCH, shuffle=shuffle):
        touch(batch)
        rows += len(batch["c0"])
    return rows / (time.perf_counter() - started)


def first_rate(pattern: str, ours: bool) -> float:
    """Rows per second of the first epoch of a new rank, or of pyarrow alone in one."""
    # What both import is nobody's time.
    import pyarrow.parquet

    files = sorted(glob.glob(pattern))
    pyarrow.parquet.ParquetFile(files[0]).read_row_group(0)
    return rate(False) if ours else raw_rate(files)


def rates() -> tuple[list[list[float]], float]:
    """In one rank by turns: in the order of the files, shuffled, pyarrow on the same files; and their size in MiB."""
    # What both import is nobody's time.
    import pyarrow.parquet  # noqa: F401

    [folder] = glob.glob(os.path.join(str(rt.get_context().storage_path), "submissions", "*", "datasets", "*"))
    files = sorted(glob.glob(f"{folder}/*.parquet"))
    turns = [[rate(False), rate(True), raw_rate(files)] for _ in range(RUNS)]
    return turns, sum(map(os.path.getsize, files)) / (1 << 20)


def raw_rate(files: list[str]) -> float:
    """The same with pyarrow alone, on all rows: the floor."""
    import pyarrow.parquet as pq
    import torch

    started, rows = time.perf_counter(), 0
    for file in files:
        parquet = pq.ParquetFile(file)
        for number in range(parquet.num_row_groups):
            for group in parquet.read_row_group(number).to_batches():
                for low in range(0, group.num_rows, BATCH):
                    batch = group.slice(low, BATCH)
                    touch({name: torch.from_dlpack(batch.column(name)) for name in batch.schema.names})
                    rows += batch.num_rows
    return rows / (time.perf_counter() - started)


def pyspark_rate(rows: int) -> float:
    """Rows per second of pyspark's loader, in a rank of its own distributor."""
    from pyspark.ml.torch.distributor import _get_spark_partition_data_loader as loader_of

    started = time.perf_counter()
    for batch in loader_of(rows, BATCH, num_workers=0):
        touch(batch)
    return rows / (time.perf_counter() - started)


def first_batch() -> float:
    """The moment of a rank's first batch."""
    next(rt.get_dataset_shard().iter_batches(BATCH))
    return time.time()


def peer_rates(folder: str) -> dict[str, list[float]]:
    """Rows per second of what reads Parquet for PyTorch elsewhere, where it is installed."""
    command = [sys.executable, os.path.join(os.path.dirname(__file__), "data_peers.py"), folder, str(RUNS)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def memory(shuffle: bool) -> float:
    """MiB of its own memory that a rank takes more than before its first batch, while it reads all rows."""
    shard = rt.get_dataset_shard()

    def anonymous() -> float:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 1024

    next(shard.iter_batches(BATCH, shuffle=True))
    before = most = anonymous()
    for number, _ in enumerate(shard.iter_batches(BATCH, shuffle=shuffle)):
        if number % 50 == 0:
            most = max(most, anonymous())
    return most - before


def main() -> None:
    from pyspark.ml.torch.distributor import TorchDistributor
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    report = Report("data", f"{THOUSANDS} thousand rows of {COLUMNS} floats, batches of {BATCH}")
    columns = [F.rand(number).cast("float").alias(f"c{number}") for number in range(COLUMNS)]
    frame = spark.range(0, THOUSANDS * 1000, 1, 4).select(*columns)
    with tempfile.TemporaryDirectory(prefix="rankzero-bench-") as store:
        launcher = Launcher(1, engine=SparkEngine(session=spark), store=store, dataset=frame)
        started = time.time()
        report.add("from run to the first batch, Spark's work with it", [launcher.run(first_batch) - started])
        turns_of_frame, size = launcher.run(rates)
        grown = [launcher.run(memory, shuffle) for shuffle in (False, True)]
        frame.write.parquet(f"{store}/parquet")
        from_parquet = launcher.options(engine=None, dataset=f"{store}/parquet")
        pattern = f"{store}/parquet/*.parquet"
        turns = [[from_parquet.run(first_rate, pattern, ours) for ours in (True, False)] for _ in range(2 * RUNS)]
        first, first_raw = zip(*turns, strict=True)
        peers = peer_rates(f"{store}/parquet")
        small = frame.limit(PYSPARK_ROWS).repartition(1)
        distributor = TorchDistributor(num_processes=1, local_mode=False, use_gpu=False)
        pysparks = [distributor._train_on_dataframe(pyspark_rate, small, PYSPARK_ROWS) for _ in range(2)]
    ordered, mixed, floor = zip(*turns_of_frame, strict=True)
    ours = report.add("a rank, in the order of the files", ordered, "rows/s")
    shuffled = report.add("a rank, shuffled", mixed, "rows/s")
    bare = report.add("pyarrow to torch, the same files", floor, "rows/s")
    read = report.add("a rank, files of Spark's own writer", first, "rows/s")
    bare_read = report.add("pyarrow to torch, the same, each in a new process", first_raw, "rows/s")
    theirs = report.add("pyspark's _get_spark_partition_data_loader", pysparks, "rows/s")
    others = [report.add(f"{name}, the same Parquet files", values, "rows/s") for name, values in peers.items()]
    report.add(f"memory of a rank beyond its start, in order and shuffled, of {size:.0f} MiB", grown, "MiB")
    report.hold("ours / pyspark's", ours / theirs, 20, at_least=True)
    report.hold("ours, shuffled / pyspark's, which cannot", shuffled / theirs, 20, at_least=True)
    report.hold("ours / pyarrow, the rows of a frame", ours / bare, 0.8, at_least=True)
    report.hold("ours / pyarrow, files of Spark's own writer", read / bare_read, 0.8, at_least=True)
    for name, other in zip(peers, others, strict=True):
        report.hold(f"ours / {name}, Parquet files", read / other, 1, at_least=True)
    report.finish()
    spark.stop()


if __name__ == "__main__":
    main()
