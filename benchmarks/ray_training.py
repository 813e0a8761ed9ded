"""The training of `training.py` in Ray Train's workers: by hand, with its wrappers, and with those of `rankzero.train`.

Prints the seconds of each side's epochs as JSON. A program of its own: a Ray that runs takes time from what is measured
beside it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from training import RANKS, build, by_hand, epoch_of, loader, prepared
from turns import Turns, take_turns


def by_ray() -> Callable[[], None]:
    """With what Ray Train has."""
    import torch

    model = prepare_model(build())
    batches = prepare_data_loader(loader(shuffle=True))
    train = epoch_of(model, batches, torch.optim.SGD(model.parameters(), lr=0.01))
    epochs = 0

    def epoch() -> None:
        nonlocal epochs
        batches.sampler.set_epoch(epochs)
        epochs += 1
        train()

    return epoch


def ddp() -> Turns:
    """Seconds of an epoch."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    sides = {
        "by hand": by_hand(DistributedDataParallel(build())),
        "by hand, again": by_hand(DistributedDataParallel(build())),
        "rankzero.train": prepared("ddp"),
        "Ray Train": by_ray(),
    }
    return take_turns(sides, turns=12, steps=1)


def main() -> None:
    # Ray's workers are started by Ray, which knows nothing of this folder.
    paths = [os.path.dirname(os.path.abspath(__file__)), os.environ.get("PYTHONPATH", "")]
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}}
    ray.init(num_cpus=2 * RANKS, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    with tempfile.TemporaryDirectory(prefix="rankzero-bench-") as store:
        trainer = TorchTrainer(
            ddp,
            scaling_config=ScalingConfig(num_workers=RANKS),
            torch_config=TorchConfig(backend="gloo"),
            run_config=RunConfig(storage_path=store),
        )
        taken = trainer.fit().return_value
    ray.shutdown()
    print(json.dumps(taken))


if __name__ == "__main__":
    main()
