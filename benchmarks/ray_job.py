"""Ray Train's launches of the same 2-rank all-reduce: the first with a Ray that has to start, and two later ones.

Prints their seconds as JSON. A program of its own: a Ray that runs takes time from what is measured beside it.
"""

import json
import sys
import tempfile

import ray
from measure import timed
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

LATER = 2


def all_reduce() -> None:
    import torch
    import torch.distributed as dist

    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == dist.get_world_size() > 1


def main(ranks: int) -> None:
    with tempfile.TemporaryDirectory(prefix="rankzero-bench-") as store:

        def launch() -> None:
            trainer = TorchTrainer(
                all_reduce,
                scaling_config=ScalingConfig(num_workers=ranks),
                torch_config=TorchConfig(backend="gloo"),
                run_config=RunConfig(storage_path=store),
            )
            trainer.fit()

        def first() -> None:
            ray.init(num_cpus=2 * ranks, include_dashboard=False, log_to_driver=False)
            launch()

        seconds = timed(first) + timed(launch, LATER)
        ray.shutdown()
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(int(sys.argv[1]))
