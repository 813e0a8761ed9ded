"""Hyper-parameter sweep: a partition for each setting, and the best of them.

    dagster dev -f example_dags/dagster/sweep.py -d example_dags

A backfill of `candidate` trains the settings next to each other, as many as the pool `gpus` allows
(``dagster instance concurrency set gpus 2``). `best` reads their accuracy from the handles and opens no weights.
"""

import os
from typing import Any

import dagster as dg
import digits

import rankzero.train as rt
from dagster_rankzero import RankZeroIOManager, TorchDistributorResource, torch_asset
from rankzero import ResultRef

SETTINGS = {
    "fast": {"lr": 4e-3, "batch_size": 32},
    "careful": {"lr": 1e-3, "batch_size": 32},
    "timid": {"lr": 1e-5, "batch_size": 64},
}


@dg.asset(kinds={"scikitlearn"})
def sweep_scans() -> dict[str, Any]:
    """Training scans only, a part of them held out: the test scans would flatter the best."""
    scans = digits.prepare()
    images, labels = scans["train_images"], scans["train_labels"]
    names = ("test_images", "test_labels", "train_images", "train_labels")
    parts = (images[:250], labels[:250], images[250:], labels[250:])
    return {name: part.clone() for name, part in zip(names, parts, strict=True)}


@torch_asset(
    partitions_def=dg.StaticPartitionsDefinition(list(SETTINGS)),
    pool="gpus",
    kinds={"pytorch", "spark"},
)
def candidate(sweep_scans: dict[str, Any], partition_key: str) -> dict[str, Any]:
    """The weights of one setting. The metrics that rank 0 reports go along with their handle."""
    state = digits.train(sweep_scans, epochs=4, **SETTINGS[partition_key])
    rt.report({"accuracy": digits.accuracy(state, sweep_scans)})
    return state


@dg.asset
def best(context: dg.AssetExecutionContext, candidate: dict[str, ResultRef]) -> ResultRef:
    """The weights of the best setting: the file is linked, not copied."""
    name = max(candidate, key=lambda setting: candidate[setting].summary["metrics"]["accuracy"])
    context.add_output_metadata({"setting": name})
    return candidate[name]


defs = dg.Definitions(
    assets=[sweep_scans, candidate, best],
    resources={
        "torch_distributor": TorchDistributorResource(num_processes=2, master=os.environ.get("SPARK_MASTER")),
        "io_manager": RankZeroIOManager(),
    },
)
