"""`ElasticSampler`: shares of what is left of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from rankzero.compat.horovod.torch import world


class ElasticSampler(Sampler[int]):
    """This rank's share of the indices that no rank has processed in this epoch.

    Args:
        dataset: With a length.
        shuffle: Another order in each epoch.
        seed: Of the order.

    Attributes:
        epoch: Of `set_epoch`.
        num_replicas: Ranks among which the indices are shared out; `rank` is this one.
        processed_indices: What is known to be processed in this epoch.
        remaining_indices: Of all ranks, in the order of the epoch.
        indices: This rank's, as many as every other rank's: some are taken twice.
        num_samples: Their number.
        total_size: That of all ranks.
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """A new epoch, in which nothing is processed."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Notes that this rank has processed a batch."""
        self.record_indices(self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size])

    def record_indices(self, indices: Any) -> None:
        """Notes that this rank has processed indices."""
        self.processed_indices.update(indices)

    def reset(self) -> None:
        """Shares out what is left."""
        left = [index for index in range(len(self.dataset)) if index not in self.processed_indices]
        if self.shuffle:
            generator = torch.Generator("cpu").manual_seed(self.seed + self.epoch)
            left = [left[place] for place in torch.randperm(len(left), generator=generator, device="cpu").tolist()]
        self.remaining_indices = left
        self.num_replicas, self.rank = (world.size(), world.rank()) if world.is_initialized() else (1, 0)
        self.num_samples = -(-len(left) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        share = range(self.rank, self.total_size, self.num_replicas)
        self.indices = [left[place % len(left)] for place in share]

    def merge(self, states: list[dict[str, Any]]) -> None:
        """Takes rank 0's epoch, and notes what all ranks have processed in it.

        Args:
            states: Of all ranks.
        """
        self.load_state_dict(merged(states))

    def state_dict(self) -> dict[str, Any]:
        """Epoch and processed indices, as a sorted tensor: there may be millions."""
        indices = torch.tensor(list(self.processed_indices), dtype=torch.int64)
        return {"epoch": self.epoch, "processed_indices": indices.sort().values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        self.epoch = state["epoch"]
        indices = state["processed_indices"]
        self.processed_indices = set(indices.tolist() if isinstance(indices, torch.Tensor) else indices)
        self.reset()

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples


def merged(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Rank 0's epoch, and what all ranks have processed in it."""
    epoch = states[0]["epoch"]
    indices = torch.cat([state["processed_indices"] for state in states if state["epoch"] == epoch])
    return {"epoch": epoch, "processed_indices": torch.unique(indices)}
