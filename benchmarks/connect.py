"""From a fresh process to rank 0's result on Spark Connect, beside pyspark's TorchDistributor there and the floor.

Run: ``python benchmarks/connect.py [runs]``. One server runs throughout; each launch is a Python process of its own, as
a pipeline's task is, and its time that of the whole process. What is compared runs in turn. Submitted runs are driven
in their own stage if they are on a path, and by the client if they are on an object store (moto's server).
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from measure import Report, timed

RANKS = 2
RUNS = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 5
SHORT = 3
"""How often what takes a second runs for each run of the peer."""


def all_reduce() -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return float(x.item())


def ours(url: str, store: str) -> object:
    from rankzero import Launcher, SparkConnectEngine

    return Launcher(RANKS, engine=SparkConnectEngine(url), store=store).run(all_reduce)


def submitted(url: str, store: str) -> object:
    from rankzero import Launcher, SparkConnectEngine

    return Launcher(RANKS, engine=SparkConnectEngine(url), store=store).submit(all_reduce).result()


def peer(url: str, _: str) -> object:
    from pyspark.ml.torch.distributor import TorchDistributor
    from pyspark.sql import SparkSession

    SparkSession.builder.remote(url).getOrCreate()
    return TorchDistributor(num_processes=RANKS, local_mode=False, use_gpu=False).run(all_reduce)


def floor(url: str, _: str) -> object:
    """A barrier stage that does nothing, with pyspark's client as it is."""
    from pyspark.sql import SparkSession

    def nothing(batches):  # type: ignore[no-untyped-def]
        for _ in batches:
            pass
        return iter(())

    spark = SparkSession.builder.remote(url).getOrCreate()
    return spark.range(RANKS, numPartitions=RANKS).mapInArrow(nothing, "task long", barrier=True).collect()


def imports(*_: str) -> object:
    """What no client of pyspark can do without."""
    import pyspark.sql.connect.session

    return pyspark.sql.connect.session


ACTIONS: dict[str, Callable[..., object]] = {
    "ours": ours,
    "submitted": submitted,
    "peer": peer,
    "floor": floor,
    "imports": imports,
}
BUCKET = "s3://benchmark"


def fresh(name: str, url: str, store: str) -> Callable[[], object]:
    command = [sys.executable, __file__, "one", name, url, store]

    def launch() -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{name} on {store}: {done.stderr[-4000:]}"

    return launch


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    os.environ.setdefault("RANKZERO_TEST_SUITE", "benchmark")
    from tests.contract.engines.connect_server import connect_server
    from tests.s3 import s3_server

    report = Report("connect", "Spark Connect: fresh process to result, 2 ranks, one all-reduce")
    found: dict[str, list[float]] = {name: [] for name in (*ACTIONS, BUCKET)}
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(tempfile.TemporaryDirectory(prefix="rankzero-bench-"))
        # Executors find it by the server's own environment.
        os.environ.update(stack.enter_context(s3_server(Path(store))).environment)
        make_bucket()
        server = stack.enter_context(connect_server(Path(store)))
        runs = {name: fresh(name, server.url, store) for name in ACTIONS}
        runs[BUCKET] = fresh("submitted", server.url, BUCKET)
        first = timed(runs["ours"])
        for name in ("peer", "ours", "ours", "submitted", BUCKET, "floor"):
            runs[name]()
        for _ in range(RUNS):
            for name in ("floor", "ours", "imports", "submitted", BUCKET) * SHORT:
                found[name] += timed(runs[name])
            found["peer"] += timed(runs["peer"])
    imported = report.add("importing pyspark's client of Spark Connect", found["imports"])
    least = report.add("no-op barrier stage, pyspark's client", found["floor"])
    seconds = report.add("rankzero", found["ours"])
    report.add("rankzero, the first launch on a server", first)
    path = report.add("rankzero, submitted: driven in its stage", found["submitted"])
    url = report.add("rankzero, submitted: on an object store, driven by the client", found[BUCKET])
    theirs = report.add("TorchDistributor", found["peer"])
    report.hold("rankzero / TorchDistributor", seconds / theirs, 0.1)
    report.hold("rankzero / floor (no-op barrier stage)", seconds / least, 1.0)
    report.hold("seconds beyond the imports", seconds - imported, 1.0)
    report.hold("submitted: seconds that an object store takes longer than a path", url - path, 2.0)
    report.finish()


def make_bucket() -> None:
    import s3fs

    s3fs.S3FileSystem().mkdir(BUCKET)


if __name__ == "__main__":
    if sys.argv[1:2] == ["one"]:
        ACTIONS[sys.argv[2]](*sys.argv[3:])
        sys.stdout.flush()
        os._exit(0)
    main()
