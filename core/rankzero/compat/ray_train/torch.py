"""Functions for PyTorch under the names of ``ray.train.torch``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import rankzero.train as rt
from rankzero.compat.ray_train.config import TorchConfig
from rankzero.compat.ray_train.names import lookup
from rankzero.compat.ray_train.trainer import TorchTrainer

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    from rankzero.train import PreparedDataLoader

__all__ = [
    "TorchConfig", "TorchTrainer", "enable_reproducibility", "get_device", "get_devices",
    "prepare_data_loader", "prepare_model",
]  # fmt: skip


def prepare_model(
    model: nn.Module,
    move_to_device: bool = True,
    parallel_strategy: Literal["ddp", "fsdp"] | None = "ddp",
    parallel_strategy_kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Prepares a model with `rankzero.train.prepare_model`; ``"fsdp"`` is FSDP2, and works on a CPU, too.

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
    """Gives each worker its share of a loader's data, as Ray does; keeps its arguments, and sets epochs automatically.

    Every worker gets the same number of rows: the first ones are repeated, and the loader's ``drop_last`` then drops a
    batch that is not full. `rankzero.train.prepare_data_loader` describes the samplers.

    Args:
        data_loader: The loader. An ``IterableDataset`` is left alone: it yields the rows of its worker by itself.
        add_dist_sampler: False keeps the loader's own sampler, which each worker draws with its own random numbers.
        move_to_device: Whether batches are moved to the worker's device.
        auto_transfer: Accepted for compatibility; the next batch for a GPU is always copied in advance.

    Raises:
        TypeError: as `rankzero.train.prepare_data_loader`.
    """
    from torch.utils.data import IterableDataset

    from rankzero.train.data_loader import prepared
    from rankzero.train.share import Share

    context = rt.get_context()
    is_shared = add_dist_sampler and not isinstance(getattr(data_loader, "dataset", None), IterableDataset)
    rank, world_size = (context.rank, context.world_size) if is_shared else (0, 1)
    share = Share(rank, world_size, pad=True, drop=False)
    return prepared(data_loader, share, move=move_to_device, seed=0 if add_dist_sampler else None)


def get_device() -> torch.device:
    """Returns the device of this worker."""
    return rt.get_context().device


def get_devices() -> list[torch.device]:
    """Returns a list with the device of this worker."""
    return [get_device()]


def enable_reproducibility(seed: int = 0) -> None:
    """Seeds Python, torch and, if it is loaded, numpy; makes torch use deterministic algorithms."""
    import random
    import sys

    import torch

    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


__getattr__ = lookup(__name__)
