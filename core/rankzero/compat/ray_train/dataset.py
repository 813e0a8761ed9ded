"""`DatasetShard`: a worker's share of one of the trainer's data sets."""

from __future__ import annotations

import functools
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


class Batches:
    """The batches of a worker's share. Each iteration is the next epoch.

    `next` is called on the running epoch, and starts one if there is none.
    """

    def __init__(self, epoch: Callable[[], Iterator[Any]]) -> None:
        """Prepares the batches without starting an epoch.

        Args:
            epoch: Returns the batches of the next epoch.
        """
        self._epoch = epoch
        self._running: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        self._running = self._epoch()
        return self._running

    def __next__(self) -> Any:
        return next(iter(self) if self._running is None else self._running)


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
    ) -> Batches:
        """Returns batches on this worker's device, the same number on every worker. Each iteration is the next epoch.

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

        def epoch() -> Iterator[Any]:
            prepared = rt.prepare_data_loader(loader, seed=local_shuffle_seed or 0)
            prepared.set_epoch(_epochs[self._name])
            _epochs[self._name] += 1
            return iter(prepared)

        return Batches(epoch)


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
    ) -> Batches:
        """Returns batches that are dicts of tensors by column, the same number on every worker.

        Each iteration is the next epoch, or the rest of one whose position was loaded.

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
        epoch = functools.partial(
            self._rows.iter_batches,
            batch_size,
            shuffle=local_shuffle_buffer_size is not None,
            seed=local_shuffle_seed or 0,
            drop_last=drop_last,
            collate=collate_fn,
            prefetch=min(prefetch_batches, 1),
        )
        # Wrong arguments are refused here. No epoch starts before the first batch is read.
        epoch()
        return Batches(epoch)
