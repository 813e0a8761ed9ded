"""A large argument to several ranks, beside writing it once and reading it as often.

Run: ``python benchmarks/arguments.py [megabytes] [ranks]``.
"""

import os
import sys
import tempfile
import time
from multiprocessing import get_context

import numpy
from measure import Report

from rankzero import Launcher

MEGABYTES = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 500
RANKS = int(sys.argv[2]) if len(sys.argv) > 2 else 4
RUNS = 5


def read(path: str) -> float:
    with open(path, "rb") as file:
        return float(numpy.frombuffer(file.read(), dtype=numpy.float64).max())


def floor(array: "numpy.typing.NDArray[numpy.float64]", directory: str) -> float:
    """Seconds of writing it once and reading it in as many processes, each of which uses it all."""
    path = os.path.join(directory, "raw")
    with get_context("fork").Pool(RANKS) as pool:
        started = time.perf_counter()
        with open(path, "wb") as file:
            file.write(array.data)
        pool.map(read, [path] * RANKS, chunksize=1)
        took = time.perf_counter() - started
    os.unlink(path)
    return took


def use(array: "numpy.typing.NDArray[numpy.float64]") -> float:
    return float(array.max())


def main() -> None:
    report = Report("arguments", f"An argument of {MEGABYTES} MB to {RANKS} ranks")
    array = numpy.random.default_rng(0).random(MEGABYTES * (1 << 20) // 8)
    with tempfile.TemporaryDirectory(prefix="rankzero-bench-") as store:
        launcher = Launcher(RANKS, store=store)
        small, launches, ours, floors = array[:8].copy(), [], [], []
        launcher.run(use, small)
        for _ in range(RUNS):
            floors.append(floor(array, store))
            started = time.perf_counter()
            launcher.run(use, small)
            launches.append(time.perf_counter() - started)
            started = time.perf_counter()
            assert launcher.run(use, array) == array.max()
            ours.append(time.perf_counter() - started - launches[-1])
    report.add("a launch with a small argument", launches)
    own = report.add("what the large argument adds to it", ours)
    raw = report.add("write once, read by every process", floors)
    report.hold("ours / raw", own / raw, 1.5)
    report.finish()


if __name__ == "__main__":
    main()
