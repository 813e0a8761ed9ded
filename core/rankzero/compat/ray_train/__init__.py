"""Ray Train's interface on rankzero's launcher: a training script moves over by changing its imports.

    from ray import train                     ->  from rankzero.compat.ray_train import train
    from ray.train import report, RunConfig       from rankzero.compat.ray_train import report, RunConfig
    from ray.air import session, ScalingConfig    from rankzero.compat.ray_train import session, ScalingConfig
    from ray.train.torch import TorchTrainer      from rankzero.compat.ray_train.torch import TorchTrainer
    import ray.train.lightning                    import rankzero.compat.ray_train.lightning

This package only translates names and arguments. Runs start through `Launcher` only.
"""

from rankzero.compat.ray_train import config, torch, train
from rankzero.compat.ray_train.config import TorchConfig, UnsupportedError, lookup
from rankzero.compat.ray_train.torch import TorchTrainer
from rankzero.compat.ray_train.train import *  # noqa: F403
from rankzero.compat.ray_train.train import session

__all__ = [*train.__all__, "TorchConfig", "TorchTrainer", "UnsupportedError", "config", "session", "torch", "train"]

__getattr__ = lookup(__name__, "huggingface", "lightning")
