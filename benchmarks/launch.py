"""Launch time of a 2-rank all-reduce, beside TorchDistributor, torchrun, Ray Train and the floor.

Run: ``python benchmarks/launch.py [runs]``. The floor is a no-op barrier job, and a fork of two processes that have
torch loaded and do the same all-reduce. What is compared runs in turn, so that the machine's moods hit all of it.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from measure import Report, timed

from rankzero import Launcher, SparkEngine

RANKS = 2
RUNS = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 5
FIRST_RUNS = 3
RAY_RUNS = 2
SHORT = ("barrier", "fork", "rankzero", "local")
"""What takes less than a second, and so is run more often."""

SETTLING = 0.4
"""Seconds of a pause in which zygotes fork ahead."""


def all_reduce() -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return float(x.item())


def fork_floor(ranks: int = RANKS) -> None:
    """Forks of this process, which has torch loaded, meet and do it."""
    import torch.distributed as dist

    read, write = os.pipe()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            store = dist.TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False) if rank == 0 else None
            if store:
                os.write(write, store.port.to_bytes(4, "big") * (ranks - 1))
            else:
                store = dist.TCPStore("127.0.0.1", int.from_bytes(os.read(read, 4), "big"), ranks, is_master=False)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
            import torch

            dist.all_reduce(torch.ones(1))
            dist.destroy_process_group()
            os._exit(0)
        children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    os.close(read)
    os.close(write)


def make_session() -> object:
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master(f"local[{RANKS}]").config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def spark_runs(spark: object, store: str) -> dict[str, Callable[[], object]]:
    from pyspark.ml.torch.distributor import TorchDistributor

    return {
        "rankzero": lambda: Launcher(RANKS, engine=SparkEngine(session=spark), store=store).run(all_reduce),  # type: ignore[arg-type]
        "peer": lambda: TorchDistributor(num_processes=RANKS, local_mode=False, use_gpu=False).run(all_reduce),
    }


def first(which: str) -> None:
    """The first launch in a fresh session: this process's only one."""
    with tempfile.TemporaryDirectory(prefix="rankzero-bench-") as store:
        if which == "local":
            action: Callable[[], object] = lambda: Launcher(RANKS, store=store).run(all_reduce)  # noqa: E731
        else:
            action = spark_runs(make_session(), store)[which]
        print("took", *timed(action), flush=True)
    os._exit(0)


def timed_first(which: str) -> float:
    done = subprocess.run([sys.executable, __file__, "first", which], check=True, capture_output=True, text=True)
    return float(done.stdout.split("took", 1)[1].split()[0])


def torchrun() -> None:
    program = Path(__file__).parent / "torchrun_job.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", program]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def ray_launches() -> tuple[list[float], list[float]]:
    """Seconds of first and of later launches of Ray Train; none where Ray is not installed."""
    firsts: list[float] = []
    later: list[float] = []
    if importlib.util.find_spec("ray") is None:
        print("Ray Train is left out: ray is not installed")
        return firsts, later
    command = [sys.executable, str(Path(__file__).parent / "ray_job.py"), str(RANKS)]
    for _ in range(RAY_RUNS):
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        first_seconds, *rest = json.loads(done.stdout.splitlines()[-1])
        firsts.append(first_seconds)
        later += rest
    return firsts, later


def main() -> None:
    report = Report("launch", "Launch of 2 ranks, one all-reduce, return")
    firsts: dict[str, list[float]] = {"rankzero": [], "peer": [], "local": []}
    bare: list[float] = []
    for _ in range(FIRST_RUNS):
        for which, seconds in firsts.items():
            seconds.append(timed_first(which))
        bare += timed(torchrun)
    ray_firsts, ray_later = ray_launches()
    spark = make_session()

    def no_op(rows: object) -> list[int]:
        return [sum(1 for _ in rows)]  # type: ignore[attr-defined]

    def barrier() -> None:
        spark.sparkContext.parallelize(range(RANKS), RANKS).barrier().mapPartitions(no_op).collect()  # type: ignore[attr-defined]

    later: dict[str, list[float]] = {name: [] for name in (*SHORT, "peer", "fork alone", "local alone")}
    with tempfile.TemporaryDirectory(prefix="rankzero-bench-") as store:
        runs = {**spark_runs(spark, store), "barrier": barrier}
        runs["local"] = lambda: Launcher(RANKS, store=store).run(all_reduce)
        for action in runs.values():
            action()
        time.sleep(3.0)  # What a zygote loads in a pause.
        import torch  # noqa: F401

        runs["fork"] = fork_floor
        for name in ("fork", "local") * RUNS * 3:
            # Nothing that was forked ahead for the next launch runs into the floor.
            time.sleep(SETTLING)
            later[f"{name} alone"] += timed(runs[name])
        for _ in range(RUNS):
            for name in SHORT * 3:
                later[name] += timed(runs[name])
            later["peer"] += timed(runs["peer"])
            bare += timed(torchrun)
    barriers = report.add("no-op barrier job", later["barrier"])
    fork = report.add("fork and all-reduce", later["fork"])
    ours = report.add("rankzero, SparkEngine, later launches", later["rankzero"])
    ours_first = report.add("rankzero, SparkEngine, first launch in a session", firsts["rankzero"])
    local = report.add("rankzero, LocalEngine, later launches", later["local"])
    local_first = report.add("rankzero, LocalEngine, first launch", firsts["local"])
    peer = report.add("TorchDistributor, later launches", later["peer"])
    peer_first = report.add("TorchDistributor, first launch in a session", firsts["peer"])
    plain = report.add("torchrun", bare)
    if ray_later:
        report.add("Ray Train, later launches", ray_later)
        report.add("Ray Train, first launch, Ray has to start", ray_firsts)
    local_alone = report.add("rankzero, LocalEngine, later launches, each after a pause", later["local alone"])
    fork_alone = report.add("fork and all-reduce, each after a pause", later["fork alone"])
    report.hold("SparkEngine later / TorchDistributor later", ours / peer, 0.03)
    report.hold("SparkEngine later / floor (barrier job + fork)", ours / (barriers + fork), 1.6)
    report.hold("LocalEngine later / floor (fork)", local / fork, 1.15)
    report.hold("LocalEngine later / floor (fork), each after a pause", local_alone / fork_alone, 1.15)
    report.hold("SparkEngine first / TorchDistributor first", ours_first / peer_first, 0.3)
    report.hold("LocalEngine first / torchrun", local_first / plain, 0.5)
    report.hold("LocalEngine later / torchrun", local / plain, 0.1)
    report.finish()
    spark.stop()  # type: ignore[attr-defined]


if __name__ == "__main__":
    if sys.argv[1:2] == ["first"]:
        first(sys.argv[2])
    main()
