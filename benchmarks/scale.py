"""Many ranks on one machine, warm: seconds, and memory of each rank with shared pages counted once.

Run: ``python benchmarks/scale.py [ranks ...]``. The peer is TorchDistributor with 4 ranks; the floor is forks that have
torch loaded and do the same: from some thirty ranks on two cores the collective library's own mesh is most of it.
"""

import os
import sys
import tempfile

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
# The peer's ranks have to find the module of the function; ours get it with the job.
os.environ["PYTHONPATH"] = os.path.dirname(os.path.abspath(__file__))

from launch import all_reduce, fork_floor
from measure import Report, timed

from rankzero import Launcher

NUMBERS = [int(number) for number in sys.argv[1:] if number.isdigit()] or [2, 4, 8, 16, 32, 64]
PEER_RANKS = 4
RUNS = 5


def own_memory() -> float:
    """Megabytes: every page shared out among those that have it; the mean of all ranks, at the same moment."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    with open("/proc/self/smaps_rollup") as file:
        fields = dict(line.split(":") for line in file if ":" in line)
    size = torch.tensor([float(fields["Pss"].split()[0]) / 1024])
    dist.barrier()
    dist.all_reduce(size)
    return float(size) / dist.get_world_size()


def peer() -> list[float]:
    from pyspark.ml.torch.distributor import TorchDistributor
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master(f"local[{PEER_RANKS}]").config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    distributor = TorchDistributor(num_processes=PEER_RANKS, local_mode=False, use_gpu=False)
    distributor.run(all_reduce)
    seconds = timed(lambda: distributor.run(all_reduce), RUNS)
    spark.stop()
    return seconds


def main() -> None:
    report = Report("scale", "Many ranks on one machine, warm")
    medians = {}
    with tempfile.TemporaryDirectory(prefix="rankzero-bench-") as store:
        for ranks in NUMBERS:
            launcher = Launcher(ranks, store=store)
            launcher.run(all_reduce)
            medians[ranks] = report.add(f"{ranks} ranks", timed(lambda one=launcher: one.run(all_reduce), RUNS))
        memory = {ranks: Launcher(ranks, store=store).run(own_memory) for ranks in (NUMBERS[0], NUMBERS[-1])}
        for ranks, size in memory.items():
            report.add(f"memory of each of {ranks} ranks", [size], "MB")
    import torch  # noqa: F401

    for ranks in NUMBERS:
        report.add(f"floor: fork {ranks} ranks", timed(lambda number=ranks: fork_floor(number), RUNS))
    theirs = report.add(f"TorchDistributor, {PEER_RANKS} ranks", peer())
    most = NUMBERS[-1]
    report.hold(f"{most} ranks / TorchDistributor's {PEER_RANKS}", medians[most] / theirs, 1.0)
    report.hold("memory of an extra rank in MB", memory[most], 60)
    report.finish()


if __name__ == "__main__":
    main()
