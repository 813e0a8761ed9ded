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
MB = 1 << 20


def make_state(megabytes: int, tensors: int) -> dict[str, object]:
    import torch

    values = megabytes * MB // 4 // tensors
    return {f"layer{number}": torch.full((values,), float(number)) for number in range(tensors)}


def main() -> None:
    spark = SparkSession.builder.master(MASTER).config("spark.ui.enabled", "false").getOrCreate()
    runtime = spark.sparkContext._jvm.java.lang.Runtime.getRuntime()
    jvm = next(child for child in psutil.Process().children(recursive=True) if "java" in child.name())

    def heap() -> float:
        runtime.gc()
        return (runtime.totalMemory() - runtime.freeMemory()) / MB

    with tempfile.TemporaryDirectory(prefix="rankzero-bench-") as store:
        launcher = Launcher(2, engine=SparkEngine(session=spark), store=store)
        launcher.run(make_state, 1, TENSORS)  # warm
        heap_before, jvm_before, driver_before = heap(), jvm.memory_info().rss, psutil.Process().memory_info().rss
        started = time.perf_counter()
        state = launcher.run(make_state, MEGABYTES, TENSORS)
        seconds = time.perf_counter() - started
        driver_after, jvm_after, heap_after = psutil.Process().memory_info().rss, jvm.memory_info().rss, heap()
        anonymous = psutil.Process().memory_full_info().uss / MB
        started = time.perf_counter()
        total = sum(float(tensor[0]) for tensor in state.values())  # type: ignore[attr-defined,index]
        touched = time.perf_counter() - started
        assert total == sum(range(TENSORS))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"result of {MEGABYTES} MB on {MASTER}: run() {seconds:.2f} s, first touch {touched:.3f} s")
    rows = {
        "driver RSS": (driver_before / MB, driver_after / MB),
        "driver RSS, peak": (driver_before / MB, peak),
        "driver memory of its own": (driver_before / MB, anonymous),
        "JVM heap in use": (heap_before, heap_after),
        "JVM RSS": (jvm_before / MB, jvm_after / MB),
    }
    for name, (before, after) in rows.items():
        print(f"{name:26} {before:6.0f} -> {after:6.0f} MB")
    spark.stop()


if __name__ == "__main__":
    main()
