"""`DatasetShard`: a worker's share of one of the trainer's data sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import rankzero.train as rt

_datasets: dict[str, Any] = {}
_epochs: Counter[str] = Counter()


def install(datasets: Mapping[str, Any]) -> None:
    """Sets the data sets of this worker. Called before the training function."""
    _datasets.clear()
    _datasets.update(datasets)
    _epochs.clear()


def shard(name: str) -> DatasetShard | TableShard:
    """Returns this worker's share of the data set ``name``. Raises KeyError, which lists the known names."""
    tables = rt.dataset_names()
    if name in tables:
        return TableShard(rt.get_dataset_shard(name))
    if name not in _datasets:
        known = ", ".join(sorted([*_datasets, *tables])) or "none"
        raise KeyError(f"the trainer has no data set {name!r}; TorchTrainer(datasets=...) gave: {known}")
    return DatasetShard(_datasets[name], name)


class DatasetShard:
    """A worker's share of a torch data set."""

    def __init__(self, data: Any, name: str) -> None:
        self._data = data
        self._name = name

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
        """Yields the batches of the next epoch on this worker's device; every worker gets the same number of batches.

        Args:
            batch_size: Rows of a batch.
            drop_last: Whether to leave out the last batch if it is smaller.
            collate_fn: Makes a batch of a list of rows; None: torch's default.
            local_shuffle_buffer_size: Any value except None shuffles the whole data set.
            local_shuffle_seed: Seed of the order.
            prefetch_batches: Accepted for compatibility; on a GPU one batch is always copied in advance.

        Raises:
            ValueError: ``local_shuffle_buffer_size`` for a data set without indices.
        """
        from torch.utils.data import DataLoader, IterableDataset

        shuffle = local_shuffle_buffer_size is not None
        if shuffle and isinstance(self._data, IterableDataset):
            raise ValueError(
                f"local_shuffle_buffer_size is {local_shuffle_buffer_size}, but the data set {self._name!r} is an "
                "IterableDataset, which has no indices to shuffle: leave it out, and shuffle in the data set"
            )
        loader = DataLoader(self._data, batch_size, shuffle=shuffle or None, drop_last=drop_last, collate_fn=collate_fn)
        prepared = rt.prepare_data_loader(loader, seed=local_shuffle_seed or 0)
        prepared.set_epoch(_epochs[self._name])
        _epochs[self._name] += 1
        return iter(prepared)


class TableShard:
    """A worker's share of the rows of a DataFrame or of a table at a path."""

    def __init__(self, rows: rt.DatasetShard) -> None:
        self._rows = rows

    def iter_torch_batches(
        self,
        *,
        batch_size: int = 256,
        drop_last: bool = False,
        collate_fn: Callable[[dict[str, Any]], Any] | None = None,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        prefetch_batches: int = 1,
    ) -> Iterator[Any]:
        """Yields the batches of the next epoch as dicts of tensors by column, the same number on every worker.

        Args:
            batch_size: Rows of a batch.
            drop_last: Whether to leave out the last batch if it is smaller.
            collate_fn: Makes a batch of the dict of columns.
            local_shuffle_buffer_size: Any value except None shuffles all rows, over all workers.
            local_shuffle_seed: Seed of the order.
            prefetch_batches: 0 reads nothing in advance.

        Raises:
            InvalidJobError: as `rankzero.train.DatasetShard.iter_batches`.
        """
        return self._rows.iter_batches(
            batch_size,
            shuffle=local_shuffle_buffer_size is not None,
            seed=local_shuffle_seed or 0,
            drop_last=drop_last,
            collate=collate_fn,
            prefetch=min(prefetch_batches, 1),
        )
