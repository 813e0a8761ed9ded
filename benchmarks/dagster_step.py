"""What a training costs a Dagster step: time over a plain asset, an observation, memory with a large result.

Run: ``python benchmarks/dagster_step.py [runs]``. Local engine, in-process executor, an instance on SQLite.
"""

import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

import dagster as dg
from measure import Report

from dagster_rankzero import RankZeroIOManager, TorchDistributorResource

RUNS = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 6
MEGABYTES = 500
OBSERVATIONS = 200


def train() -> int:
    return 1


def make_large() -> Any:
    import torch

    return {"weights": torch.zeros(MEGABYTES << 18)}


def make_resource(folder: str, **fields: Any) -> TorchDistributorResource:
    return TorchDistributorResource(engine="local", store=f"{folder}/runs", **fields)


@dg.asset
def plain() -> int:
    return train()


@dg.asset
def trained(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource) -> Any:
    return torch_distributor.run(context, train)


@dg.asset(retry_policy=dg.RetryPolicy(max_retries=1))
def durable(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource) -> Any:
    return torch_distributor.run(context, train)


@dg.asset
def large(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource) -> Any:
    return torch_distributor.run(context, make_large)


@dg.asset
def observed(context: dg.AssetExecutionContext) -> None:
    began = time.perf_counter()
    for step in range(OBSERVATIONS):
        metadata = {"metric/loss": 1.0 / (step + 1), "metric/epoch": step}
        context.log_event(dg.AssetObservation(asset_key=context.asset_key, metadata=metadata))
    print("each", (time.perf_counter() - began) / OBSERVATIONS, flush=True)


def materialize(asset: dg.AssetsDefinition, folder: str, **fields: Any) -> None:
    resources = {
        "torch_distributor": make_resource(folder, **fields),
        "io_manager": RankZeroIOManager(base_path=f"{folder}/assets"),
    }
    with dg.DagsterInstance.get() as instance:
        assert dg.materialize([asset], resources=resources, instance=instance).success


def seconds(asset: dg.AssetsDefinition, folder: str) -> list[float]:
    materialize(asset, folder)
    taken = []
    for _ in range(RUNS):
        began = time.perf_counter()
        materialize(asset, folder)
        taken.append(time.perf_counter() - began)
    return taken


def told(which: str, folder: str, word: str) -> float:
    """The number behind a word that a process prints which materializes one of the assets."""
    done = subprocess.run([sys.executable, __file__, which, folder], check=True, capture_output=True, text=True)
    return float(done.stdout.rpartition(f"{word} ")[2].split()[0])


def main() -> None:
    report = Report("dagster_step", "A Dagster step with a training of one rank on this machine, beside a plain asset")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DAGSTER_HOME"] = folder
        with open(f"{folder}/dagster.yaml", "w") as file:
            file.write("telemetry: {enabled: false}\n")
        report.add("a plain asset, warm", seconds(plain, folder))
        report.add("a training that ends with its step, warm", seconds(trained, folder))
        report.add("a training that outlives its step, warm", seconds(durable, folder))
        report.add("an observation, SQLite", [1000 * told("observe", folder, "each")], "ms")
        small = report.add("peak memory of the step's process, a small result", [told("small", folder, "peak")], "MB")
        big = report.add(f"the same, {MEGABYTES} MB by reference", [told("large", folder, "peak")], "MB")
    report.hold(f"memory for {MEGABYTES} MB by reference over a small result, MB", big - small, 50.0)
    report.finish()


if __name__ == "__main__":
    logging.getLogger("dagster").setLevel(logging.ERROR)
    if sys.argv[1:] and not sys.argv[1].isdigit():
        which, folder = sys.argv[1:]
        materialize({"observe": observed, "small": trained, "large": large}[which], folder, by_reference=True)
        print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    else:
        main()
