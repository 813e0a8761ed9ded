"""A fresh process to its result, on embedded Spark: what every pipeline task pays that brings its own JVM.

Run: ``python benchmarks/fresh.py [runs]``. Interleaved: `Launcher.run` of a 2-rank all-reduce on
`SparkEngine("local[2]")`, and a no-op barrier job in a bare pyspark session. Seconds from the start of the interpreter
to the line with the result.
"""

import os
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from measure import Report

RANKS = 2
RUNS = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 5
DONE = "fresh: done"


def all_reduce() -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return float(x.item())


def no_op(rows):  # type: ignore[no-untyped-def]
    for _ in rows:
        pass
    return iter(())


def launch() -> None:
    from rankzero import Launcher, SparkEngine

    with tempfile.TemporaryDirectory(prefix="rankzero-bench-") as store:
        assert Launcher(RANKS, engine=SparkEngine(f"local[{RANKS}]"), store=store).run(all_reduce) == RANKS


def make_session():  # type: ignore[no-untyped-def]
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(f"local[{RANKS}]").config("spark.ui.enabled", "false")
    return builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()


def barrier_job() -> None:
    context = make_session().sparkContext
    context.parallelize(range(RANKS), RANKS).barrier().mapPartitions(no_op).collect()


ACTIONS = {"rankzero": launch, "plain": barrier_job}


def fresh(what: str) -> float:
    """Seconds of one action in an interpreter of its own, which is awaited after its result, too."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, __file__, "action", what], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stderr
    seconds = next((time.perf_counter() - started for line in process.stdout if DONE in line), None)
    errors = process.stderr.read()
    if process.wait() or seconds is None:
        raise RuntimeError(f"{what}: {errors}")
    return seconds


def main() -> None:
    report = Report("fresh", f"A fresh process to its result on embedded Spark, {RANKS} ranks")
    times: dict[str, list[float]] = {name: [] for name in ACTIONS}
    # The first ones read what lies on the disk.
    for name in ACTIONS:
        fresh(name)
    for number in range(RUNS):
        for name in sorted(ACTIONS, reverse=bool(number % 2)):
            times[name].append(fresh(name))
    ours = report.add("rankzero, all-reduce", times["rankzero"])
    plain = report.add("pyspark as it is, no-op barrier job", times["plain"])
    report.hold("of a bare session as it is", ours / plain, 0.7)
    report.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["action"]:
        ACTIONS[sys.argv[2]]()
        print(DONE, flush=True)
    else:
        main()
