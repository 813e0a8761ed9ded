"""`DatasetShard`: a worker's share of one of the trainer's data sets."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import rankzero.train as rt
from rankzero.compat.ray_train.config import DataConfig
from rankzero.data.columns import as_table

if TYPE_CHECKING:
    import torch

ALL = 1 << 40  # Rows of a batch that has all rows.

_shards: dict[str, DatasetShard] = {}
"""The torch data sets of this worker."""


def install(datasets: Mapping[str, Any], config: DataConfig = DataConfig()) -> None:  # noqa: B008
    """Sets the data sets of this worker. Called before the training function."""
    _shards.clear()
    _shards.update({name: DatasetShard(data, name, config.splits(name)) for name, data in datasets.items()})


def shard(name: str) -> DatasetShard | TableShard:
    """Returns this worker's share of the data set ``name``. Raises KeyError, which lists the known names."""
    tables = rt.dataset_names()
    if name in tables:
        return TableShard(rt.get_dataset_shard(name), name)
    if name not in _shards:
        known = ", ".join(sorted([*_shards, *tables])) or "none"
        raise KeyError(f"the trainer has no data set {name!r}; TorchTrainer(datasets=...) gave: {known}")
    return _shards[name]


class Batches:
    """The batches of a worker's share. Each iteration is the next epoch.

    `next` is called on the running epoch, and starts one if there is none.
    """

    def __init__(self, epoch: Callable[[], Iterator[Any]]) -> None:
        """Prepares batches without starting an epoch: ``epoch`` returns those of the next one."""
        self._epoch = epoch
        self._running: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        self._running = self._epoch()
        return self._running

    def __next__(self) -> Any:
        return next(iter(self) if self._running is None else self._running)


class _Cut(NamedTuple):
    """The options of an iteration, under Ray's names ``batch_size``, ..., ``prefetch_batches``."""

    size: int
    drop_last: bool
    shuffle: int | None
    seed: int
    prefetch: int


class Shard:
    """A worker's share of a data set, with the interface of Ray's ``DataIterator``."""

    def __init__(self, data: Any, name: str, is_split: bool = True) -> None:
        self._data = data
        self._name = name
        self._is_split = is_split
        self._epochs = itertools.count()

    def _epoch(self, cut: _Cut, make: Callable[[Any], Any]) -> Callable[[], Iterator[Any]]:
        """Returns a function that returns the batches of the next epoch, each made by ``make`` of its columns."""
        raise NotImplementedError

    def iter_torch_batches(
        self,
        *,
        prefetch_batches: int = 1,
        batch_size: int | None = 256,
        dtypes: Any = None,
        device: torch.device | str = "auto",
        collate_fn: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        pin_memory: bool = False,
    ) -> Batches:
        """Returns batches of tensors, the same number on every worker. Each iteration is the next epoch.

        A table, and a data set whose rows are dicts, has dicts of tensors by column. Others have what torch's default
        collation makes of a list of rows.

        Args:
            prefetch_batches: 0 reads nothing in advance.
            batch_size: Rows of a batch; None for one batch of all rows.
            dtypes: Type of all tensors, or a dict of the types by column.
            device: Device of the tensors; ``"auto"`` for this worker's.
            collate_fn: Makes a batch of a dict of numpy arrays by column; of a list of rows that are no dicts.
            drop_last: Whether to leave out the last batch if it is smaller.
            local_shuffle_buffer_size: Any value except None shuffles all rows, over all workers.
            local_shuffle_seed: Seed of the order.
            pin_memory: Accepted for compatibility.

        Raises:
            InvalidJobError: as `rankzero.train.DatasetShard.iter_batches`.
            ValueError: ``collate_fn`` together with ``dtypes``; the data set has no indices to shuffle.
        """
        if collate_fn is not None and dtypes is not None:
            raise ValueError("collate_fn decides about the types of its tensors: leave dtypes out")

        def make(rows: Any) -> Any:
            if collate_fn is None:
                return _cast(_collated(rows), dtypes)
            is_columns = isinstance(rows, dict)
            return collate_fn({name: _array(values) for name, values in rows.items()} if is_columns else rows)

        cut = _Cut(batch_size or ALL, drop_last, local_shuffle_buffer_size, local_shuffle_seed or 0, prefetch_batches)
        return Batches(functools.partial(_moved, self._epoch(cut, make), device))

    def iter_batches(
        self,
        *,
        prefetch_batches: int = 1,
        batch_size: int | None = 256,
        batch_format: str | None = "default",
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
    ) -> Batches:
        """Returns batches, as `iter_torch_batches`, in another form. Rows that are no dicts are a column ``item``.

        The arguments are those of `iter_torch_batches`, and ``batch_format``: ``"numpy"`` or ``"default"`` for dicts of
        arrays, ``"pandas"`` for a DataFrame, ``"pyarrow"`` for a Table.

        Raises:
            ValueError: another format; the data set has no indices to shuffle.
        """
        if batch_format not in (None, "default", "numpy", "pandas", "pyarrow"):
            raise ValueError(f'batch_format is {batch_format!r}; choose "numpy", "pandas" or "pyarrow"')

        def make(rows: Any) -> Any:
            columns = rows if isinstance(rows, dict) else {"item": rows}
            return _formatted({name: _array(values) for name, values in columns.items()}, batch_format)

        cut = _Cut(batch_size or ALL, drop_last, local_shuffle_buffer_size, local_shuffle_seed or 0, prefetch_batches)
        return Batches(self._epoch(cut, make))

    def iter_rows(self) -> Batches:
        """Returns the rows as dicts with a value for each column. Each iteration is the next epoch."""
        batches = self.iter_batches()

        def epoch() -> Iterator[dict[str, Any]]:
            for batch in batches:
                yield from (dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True))

        return Batches(epoch)


class DatasetShard(Shard):
    """A worker's share of a torch data set."""

    def _epoch(self, cut: _Cut, make: Callable[[Any], Any]) -> Callable[[], Iterator[Any]]:
        from torch.utils.data import DataLoader, IterableDataset

        from rankzero.train.data_loader import prepared
        from rankzero.train.share import Share

        if cut.shuffle is not None and isinstance(self._data, IterableDataset):
            raise ValueError(
                f"local_shuffle_buffer_size is {cut.shuffle}, but the data set {self._name!r} is an "
                "IterableDataset, which has no indices to shuffle: leave it out, and shuffle in the data set"
            )

        def collate(rows: list[Any]) -> Any:
            is_columns = isinstance(rows[0], dict)
            return make({name: [row[name] for row in rows] for name in rows[0]} if is_columns else rows)

        loader = DataLoader(
            self._data, cut.size, None if cut.shuffle is None else True, drop_last=cut.drop_last, collate_fn=collate
        )
        context = rt.get_context()
        share = Share(context.rank, context.world_size, pad=True) if self._is_split else Share(0, 1, pad=True)

        def epoch() -> Iterator[Any]:
            batches = prepared(loader, share, move=False, seed=cut.seed)
            batches.set_epoch(next(self._epochs))
            return iter(batches)

        return epoch


class TableShard(Shard):
    """A worker's share of the rows of a DataFrame or of a table at a path."""

    def _epoch(self, cut: _Cut, make: Callable[[Any], Any]) -> Callable[[], Iterator[Any]]:
        order = {"shuffle": cut.shuffle is not None, "seed": cut.seed, "drop_last": cut.drop_last}
        reading = {"prefetch": min(cut.prefetch, 1), "device": "cpu", "collate": make}
        epoch = functools.partial(self._data.iter_batches, cut.size, **order, **reading)
        # Wrong arguments are refused here. No epoch starts before the first batch is read.
        epoch()
        return epoch


def _collated(rows: Any) -> Any:
    """Returns rows, or lists of values by column, as tensors; torch's default collation decides."""
    from torch.utils.data import default_collate

    if not isinstance(rows, dict):
        return default_collate(rows)
    return {name: _tensor(values) if isinstance(values, list) else values for name, values in rows.items()}


def _tensor(values: list[Any]) -> Any:
    """Returns the values of a column as torch's default collation does; those that are lists as one tensor, as Ray."""
    import torch
    from torch.utils.data import default_collate

    array = _array(values) if isinstance(values[0], (list, tuple)) else None
    return default_collate(values) if array is None or array.dtype.kind not in "biuf" else torch.from_numpy(array)


def _cast(batch: Any, dtypes: Any) -> Any:
    """Returns a batch with all tensors of one type, or by column of the types in a dict."""
    import torch

    if dtypes is None:
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(dtypes)
    if isinstance(batch, dict):
        by_column = isinstance(dtypes, Mapping)
        return {name: _cast(part, dtypes.get(name) if by_column else dtypes) for name, part in batch.items()}
    return type(batch)(_cast(part, dtypes) for part in batch) if isinstance(batch, (list, tuple)) else batch


def _moved(epoch: Callable[[], Iterator[Any]], device: torch.device | str) -> Iterator[Any]:
    """Returns the batches of the next epoch on a device, to which a GPU copies one in advance."""
    import torch

    from rankzero.train.data_loader import on_device

    place = rt.get_context().device if device == "auto" else torch.device(device)
    return epoch() if place.type == "cpu" else on_device(epoch(), place, ahead=place.type == "cuda")


def _array(values: Any) -> Any:
    """Returns the values of a column as a numpy array."""
    import numpy
    import torch

    if isinstance(values, list) and values and isinstance(values[0], torch.Tensor):
        values = torch.stack(values)
    return values.numpy() if isinstance(values, torch.Tensor) else numpy.asarray(values)


def _formatted(columns: dict[str, Any], batch_format: str | None) -> Any:
    """Returns arrays by column in the form that `Shard.iter_batches` was asked for."""
    if batch_format not in ("pandas", "pyarrow"):
        return columns
    # A column of arrays is one of lists there.
    found = as_table(columns)
    return found.to_pandas() if batch_format == "pandas" else found
