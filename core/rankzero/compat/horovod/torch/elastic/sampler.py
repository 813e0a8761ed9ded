"""`ElasticSampler`: shares out the rest of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from rankzero.compat.horovod.torch import world


class ElasticSampler(Sampler[int]):
    """Yields this rank's share of the indices that no rank has processed in this epoch.

    Args:
        dataset: A data set with a length.
        shuffle: Whether each epoch has a new order.
        seed: Seed of the order.

    Attributes:
        epoch: Number of the epoch, from `set_epoch`.
        num_replicas: Number of ranks among which the indices are shared out; `rank` is this one.
        processed_indices: Indices that this rank knows to be processed in this epoch.
        processed_num: Number of indices that all ranks have processed, if they go at the same pace.
        remaining_indices: Remaining indices of all ranks, in the order of the epoch.
        indices: This rank's indices, as many as every other rank's: some are taken twice.
        num_samples: Number of this rank's indices.
        total_size: Number of all ranks' indices.
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Starts a new epoch, in which no index is processed."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    @property
    def processed_num(self) -> int:
        """Returns the number of indices that all ranks have processed in this epoch, if they go at the same pace."""
        own = len(self.processed_indices) - self._shared_out
        return min(self._shared_out + own * self.num_replicas, len(self.dataset))

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Records that this rank has processed a batch."""
        self.record_indices(self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size])

    def record_indices(self, indices: Any) -> None:
        """Records that this rank has processed some indices."""
        self.processed_indices.update(indices)

    def reset(self) -> None:
        """Shares out the remaining indices among the current ranks."""
        self._shared_out = len(self.processed_indices)
        self.remaining_indices = left = self._in_order(
            [index for index in range(len(self.dataset)) if index not in self.processed_indices]
        )
        self.num_replicas, self.rank = (world.size(), world.rank()) if world.is_initialized() else (1, 0)
        self.num_samples = -(-len(left) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        share = range(self.rank, self.total_size, self.num_replicas)
        self.indices = [left[place % len(left)] for place in share]

    def _in_order(self, indices: list[int]) -> list[int]:
        """Returns the indices in the order of the epoch."""
        if not self.shuffle:
            return indices
        generator = torch.Generator("cpu").manual_seed(self.seed + self.epoch)
        return [indices[place] for place in torch.randperm(len(indices), generator=generator, device="cpu").tolist()]

    def merge(self, states: list[dict[str, Any]]) -> None:
        """Sets rank 0's epoch, and records the indices that all ranks have processed in it.

        Args:
            states: The states of all ranks.
        """
        self.load_state_dict(merged(states))

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch and the processed indices, as a sorted tensor since there may be millions."""
        indices = torch.tensor(list(self.processed_indices), dtype=torch.int64)
        return {"epoch": self.epoch, "processed_indices": indices.sort().values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the epoch and the processed indices, and shares out the rest.

        Args:
            state: The result of `state_dict`; or Horovod's, which has ``processed_num`` in place of the indices: that
                many of the epoch's order are processed.
        """
        self.epoch = state["epoch"]
        indices = state.get("processed_indices")
        if indices is None:
            indices = self._in_order(list(range(len(self.dataset))))[: state["processed_num"]]
        self.processed_indices = set(indices.tolist() if isinstance(indices, torch.Tensor) else indices)
        self.reset()

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples


def merged(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns rank 0's epoch, and the indices that all ranks have processed in it."""
    epoch = states[0]["epoch"]
    indices = torch.cat([state["processed_indices"] for state in states if state["epoch"] == epoch])
    return {"epoch": epoch, "processed_indices": torch.unique(indices)}
