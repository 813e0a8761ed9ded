"""A large state dict as result: seconds, and what it costs the driver and the JVM in memory.

Run: ``python benchmarks/result_size.py [megabytes] [master]``.
"""

import os
import resource
import sys
import tempfile
import time

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

import psutil
from pyspark.sql import SparkSession

from rankzero import Launcher, SparkEngine

MEGABYTES = int(sys.argv[1]) if len(sys.argv) > 1 else 300
MASTER = sys.argv[2] if len(sys.argv) > 2 else "local[2]"
TENSORS = 10


def make_state(megabytes: int, tensors: int) -> dict[str, object]:
    import torch

    values = megabytes * (1 << 20) // 4 // tensors
    return {f"layer{number}": torch.full((values,), float(number)) for number in range(tensors)}


def main() -> None:
    spark = SparkSession.builder.master(MASTER).config("spark.ui.enabled", "false").getOrCreate()
    runtime = spark.sparkContext._jvm.java.lang.Runtime.getRuntime()
    jvm = next(child for child in psutil.Process().children(recursive=True) if "java" in child.name())

    def heap() -> float:
        runtime.gc()
        return (runtime.totalMemory() - runtime.freeMemory()) / (1 << 20)

    with tempfile.TemporaryDirectory(prefix="rankzero-bench-") as store:
        launcher = Launcher(2, engine=SparkEngine(session=spark), store=store)
        launcher.run(make_state, 1, TENSORS)  # warm
        heap_before, jvm_before, driver_before = heap(), jvm.memory_info().rss, psutil.Process().memory_info().rss
        started = time.perf_counter()
        state = launcher.run(make_state, MEGABYTES, TENSORS)
        seconds = time.perf_counter() - started
        driver_after, jvm_after, heap_after = psutil.Process().memory_info().rss, jvm.memory_info().rss, heap()
        anonymous = psutil.Process().memory_full_info().uss / (1 << 20)
        started = time.perf_counter()
        total = sum(float(tensor[0]) for tensor in state.values())  # type: ignore[attr-defined,index]
        touched = time.perf_counter() - started
        assert total == sum(range(TENSORS))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"result of {MEGABYTES} MB on {MASTER}: run() {seconds:.2f} s, first touch {touched:.3f} s")
    mb = 1 << 20
    print(f"driver: RSS {driver_before / mb:.0f} -> {driver_after / mb:.0f} MB, peak {peak:.0f} MB, own {anonymous:.0f} MB")
    print(f"JVM: heap in use {heap_before:.0f} -> {heap_after:.0f} MB, RSS {jvm_before / mb:.0f} -> {jvm_after / mb:.0f} MB")
    spark.stop()


if __name__ == "__main__":
    main()
