"""Launch time of a 2-rank all-reduce, beside pyspark's TorchDistributor, in one run and one SparkSession.

Run: ``python benchmarks/launch.py [runs]``. Prints a table of seconds (median, min, max).
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from pyspark.sql import SparkSession

from rankzero import Launcher, SparkEngine

RANKS = 2
RUNS = int(sys.argv[1]) if len(sys.argv) > 1 else 5


def all_reduce() -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return float(x.item())


def timed(action: Callable[[], object], runs: int) -> list[float]:
    seconds = []
    for _ in range(runs):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return seconds


def row(name: str, seconds: list[float]) -> None:
    print(f"| {name:42} | {statistics.median(seconds):7.2f} | {min(seconds):7.2f} | {max(seconds):7.2f} |")


def main() -> None:
    from pyspark.ml.torch.distributor import TorchDistributor

    store = tempfile.TemporaryDirectory(prefix="rankzero-bench-")
    spark = SparkSession.builder.master(f"local[{RANKS}]").config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    on_spark = Launcher(RANKS, engine=SparkEngine(session=spark), store=store.name)
    local = Launcher(RANKS, store=store.name)
    peer = TorchDistributor(num_processes=RANKS, local_mode=False, use_gpu=False)

    def no_op(rows: object) -> list[int]:
        return [sum(1 for _ in rows)]  # type: ignore[attr-defined]

    def barrier() -> None:
        spark.sparkContext.parallelize(range(RANKS), RANKS).barrier().mapPartitions(no_op).collect()

    first = timed(lambda: on_spark.run(all_reduce), 1)
    floor = timed(barrier, RUNS)
    first_peer = timed(lambda: peer.run(all_reduce), 1)
    ours, theirs, locally = [], [], []
    for _ in range(RUNS):  # in turn, so that the machine's moods hit both
        ours += timed(lambda: on_spark.run(all_reduce), 1)
        theirs += timed(lambda: peer.run(all_reduce), 1)
        locally += timed(lambda: local.run(all_reduce), 1)
    print(f"\n| {f'{RANKS} ranks, seconds':42} | {'median':>7} | {'min':>7} | {'max':>7} |\n|---|---|---|---|")
    row("no-op barrier job (floor)", floor)
    row("rankzero, SparkEngine, first in session", first)
    row("rankzero, SparkEngine, later", ours)
    row("rankzero, LocalEngine", locally)
    row("TorchDistributor, second in session", first_peer)
    row("TorchDistributor, later", theirs)
    print(f"\nlater launches: {statistics.median(ours) / statistics.median(theirs):.2f} x TorchDistributor")
    spark.stop()
    store.cleanup()


if __name__ == "__main__":
    main()
