"""`DatasetShard`: a worker's share of one of the trainer's data sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import rankzero.train as rt

_datasets: dict[str, Any] = {}


def install(datasets: Mapping[str, Any]) -> None:
    """Sets the data sets of this worker. Called before the training function."""
    _datasets.clear()
    _datasets.update(datasets)


def shard(name: str) -> DatasetShard:
    """The share of the data set ``name``. Raises KeyError, which names those that there are."""
    if name not in _datasets:
        known = ", ".join(sorted(_datasets)) or "none"
        raise KeyError(f"the trainer has no data set {name!r}; TorchTrainer(datasets=...) gave: {known}")
    return DatasetShard(_datasets[name])


class DatasetShard:
    """This worker's share of a torch data set."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def iter_torch_batches(
        self,
        *,
        batch_size: int = 256,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        prefetch_batches: int = 1,
    ) -> Iterator[Any]:
        """Batches of one epoch, on this worker's device; every worker gets as many.

        Args:
            batch_size: Rows of a batch.
            drop_last: Leave out the last batch if it is smaller.
            collate_fn: Makes a batch of a list of rows; None: torch's.
            local_shuffle_buffer_size: Anything but None shuffles the whole data set.
            local_shuffle_seed: Of the order.
            prefetch_batches: Ray's; one batch is always ahead on a GPU.
        """
        from torch.utils.data import DataLoader

        shuffle = local_shuffle_buffer_size is not None
        loader = DataLoader(self._data, batch_size, shuffle=shuffle or None, drop_last=drop_last, collate_fn=collate_fn)
        yield from rt.prepare_data_loader(loader, seed=local_shuffle_seed or 0)
