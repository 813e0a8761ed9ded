"""Definitions that `dagster dev` serves in a test: a training that does not end by itself."""

import os

import dagster as dg

from dagster_rankzero import RankZeroIOManager, TorchDistributorResource, torch_asset

ENDLESS_RANKS = 2


@torch_asset
def endless() -> str:
    """Ignores every polite request to end."""
    import signal
    import threading

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("training")
    while True:
        threading.Event().wait(1.0)


defs = dg.Definitions(
    assets=[endless],
    jobs=[dg.define_asset_job("train", selection=[endless])],
    resources={
        "torch_distributor": TorchDistributorResource(
            num_processes=ENDLESS_RANKS,
            store=os.environ.get("TEST_STORE"),
            env={"ENDLESS_RANK": os.environ.get("TEST_RANK_MARK", "")},
        ),
        "io_manager": RankZeroIOManager(base_path=os.environ.get("TEST_ASSETS")),
    },
)
