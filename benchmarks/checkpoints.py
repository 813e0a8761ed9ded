"""A sharded checkpoint of all ranks to an object store, beside the same ranks writing the same bytes there with boto3.

Run: ``python benchmarks/checkpoints.py [megabytes of a rank] [ranks]``. The store is moto's S3 server, one process.
What it does in Python for the checksums that clients add by default would be most of both times, so neither adds them.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from measure import Report
from tests.s3 import s3_server

from rankzero import Launcher

MEGABYTES = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 256
RANKS = int(sys.argv[2]) if len(sys.argv) > 2 else 8
RUNS = 7
FIRST = 2
"""Checkpoints for which our client connects and the system finds memory for copies; they are shown apart."""

BUCKET = "benchmark"


def train(megabytes: int, runs: int, bucket: str) -> dict[str, list[float]]:
    """Writes as many checkpoints; seconds of each, from a barrier until every rank knows that it is there."""
    import io
    import time

    import boto3
    import torch
    import torch.distributed as dist

    import rankzero.train as rt

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    client = boto3.client("s3")
    # As a model has: some large tensors.
    state = {str(number): torch.rand(megabytes << 15) for number in range(8)}
    raw = torch.cat([*state.values()]).numpy().tobytes()
    times: dict[str, list[float]] = {"boto3": [], "ours": []}
    for run in range(runs):
        dist.barrier()
        started = time.perf_counter()
        client.upload_fileobj(io.BytesIO(raw), bucket, f"raw/{rank}")
        dist.barrier()
        times["boto3"].append(time.perf_counter() - started)
        dist.barrier()
        started = time.perf_counter()
        rt.report({"run": run}, checkpoint=state, sharded=True)
        # Asked for again and again, eight ranks would take a twentieth of both cores.
        rt.context.await_checkpoint()
        dist.barrier()
        times["ours"].append(time.perf_counter() - started)
        assert rt.get_checkpoint().metrics["run"] == run
    return times


def block(megabytes: int, runs: int) -> dict[str, list[float]]:
    """Seconds that a report takes from the training of one rank, and those of a copy of the same state."""
    import time

    import torch

    import rankzero.train as rt

    state = {str(number): torch.rand(megabytes << 15) for number in range(8)}
    times: dict[str, list[float]] = {"report": [], "copy": []}
    for run in range(runs):
        started = time.perf_counter()
        copy = {name: tensor.clone() for name, tensor in state.items()}
        times["copy"].append(time.perf_counter() - started)
        del copy
        started = time.perf_counter()
        rt.report({"run": run}, checkpoint=state)
        times["report"].append(time.perf_counter() - started)
        rt.context.await_checkpoint()
        assert rt.get_checkpoint().metrics["run"] == run
    return times


def main() -> None:
    report = Report("checkpoints", f"A checkpoint of {RANKS} ranks, {MEGABYTES} MB each, to an object store")
    with tempfile.TemporaryDirectory(prefix="rankzero-bench-") as folder, s3_server(Path(folder)) as server:
        os.environ.update(server.environment, AWS_REQUEST_CHECKSUM_CALCULATION="when_required")
        import s3fs

        s3fs.S3FileSystem().mkdir(BUCKET)
        launcher: Launcher[Any] = Launcher(RANKS, store=f"s3://{BUCKET}/runs")
        times = launcher.run(train, MEGABYTES, RUNS, BUCKET)
        # Alone: of many ranks on few cores the first would write while the last still copies.
        alone = Launcher(1, store=folder).run(block, MEGABYTES, 2 * RUNS)
    ours = report.add("from report to commit", times["ours"][FIRST:])
    raw = report.add("the same bytes by boto3 in every rank", times["boto3"][FIRST:])
    report.add(f"from report to commit, the first {FIRST}", times["ours"][:FIRST])
    report.add(f"the same bytes by boto3, the first {FIRST}", times["boto3"][:FIRST])
    blocked = report.add("a report blocks a rank", alone["report"])
    copied = report.add("a copy in memory", alone["copy"])
    report.hold("ours / boto3", ours / raw, 1.11)
    report.hold("report / copy", blocked / copied, 1.2)
    report.finish()


if __name__ == "__main__":
    main()
