"""``ray.train.torch``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import rankzero.train as rt
from rankzero.compat.ray_train.configs import TorchConfig

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    from rankzero.compat.ray_train.trainer import TorchTrainer
    from rankzero.train import PreparedDataLoader

__all__ = [
    "TorchConfig",
    "TorchTrainer",
    "accelerate",
    "backward",
    "enable_reproducibility",
    "get_device",
    "get_devices",
    "prepare_data_loader",
    "prepare_model",
    "prepare_optimizer",
]


def prepare_model(
    model: nn.Module,
    move_to_device: bool = True,
    parallel_strategy: Literal["ddp", "fsdp"] | None = "ddp",
    parallel_strategy_kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """`rankzero.train.prepare_model`; ``"fsdp"`` is FSDP2, on a CPU too.

    Raises:
        ValueError: ``move_to_device=False``, or an unknown strategy.
    """
    if move_to_device is not True:
        raise ValueError(f"move_to_device is {move_to_device!r}; a model lives on its worker's device, so leave it out")
    return rt.prepare_model(model, parallel_strategy, **(parallel_strategy_kwargs or {}))


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
) -> PreparedDataLoader:
    """`rankzero.train.prepare_data_loader`: keeps every argument of the loader, and sets epochs by itself.

    ``auto_transfer`` changes nothing: batches for a GPU always come one ahead.
    """
    return rt.prepare_data_loader(data_loader, shard=add_dist_sampler, move=move_to_device)


def get_device() -> torch.device:
    """The device of this worker."""
    return rt.get_context().device


def get_devices() -> list[torch.device]:
    """The devices of this worker: one."""
    return [get_device()]


def enable_reproducibility(seed: int = 0) -> None:
    """Seeds Python, numpy where it is loaded, and torch; makes torch choose deterministic algorithms."""
    import random
    import sys

    import torch

    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def accelerate(amp: bool = False) -> NoReturn:
    """Removed by Ray. Raises NotImplementedError."""
    raise NotImplementedError("accelerate() was removed: use rankzero.train.autocast() and grad_scaler()")


def prepare_optimizer(optimizer: object) -> NoReturn:
    """Removed by Ray. Raises NotImplementedError."""
    raise NotImplementedError("prepare_optimizer() was removed: use the optimizer as it is")


def backward(tensor: object) -> NoReturn:
    """Removed by Ray. Raises NotImplementedError."""
    raise NotImplementedError("backward() was removed: call loss.backward(); see rankzero.train.grad_scaler")


def __getattr__(name: str) -> Any:
    if name == "TorchTrainer":
        from rankzero.compat.ray_train.trainer import TorchTrainer

        return TorchTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
