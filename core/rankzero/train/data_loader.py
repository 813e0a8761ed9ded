"""`prepare_data_loader`: each rank its share of the data, in every epoch another order, on its device, resumable.

Imports torch, so `rankzero.train` imports it late.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from rankzero.train.context import get_context
from rankzero.train.process_group import broadcast_object

Batch = Any


class PreparedDataLoader:
    """What `prepare_data_loader` gives: iterates like the loader it was made of, whose attributes it has, too.

    Attributes:
        loader: The loader of this rank's share.
        epoch: Number of the epoch that the next iteration is, from 0.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device | None) -> None:
        self.loader = loader
        self.epoch = 0
        self._next = 0
        self._device = device
        self._skip = 0
        self._done = 0
        self._sampled = getattr(loader.sampler, "epoch", None)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration that epoch. Not needed: each iteration is one more."""
        self.epoch = self._next = epoch

    def __iter__(self) -> Iterator[Batch]:
        sampler, batch_sampler = self.loader.sampler, self.loader.batch_sampler
        if isinstance(sampler, DistributedSampler) and sampler.epoch != self._sampled:
            # The training function has set the epoch itself.
            self._next = sampler.epoch
        self.epoch = epoch = self._next
        self._next = epoch + 1
        self._done, self._skip, skip = self._skip, 0, self._skip
        for part in (sampler, batch_sampler, getattr(batch_sampler, "sampler", None), self.loader.dataset):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
        self._sampled = epoch
        batches = self._from(skip)
        if self._device is not None:
            batches = _on_device(batches, self._device, ahead=not self._is_stateful())
        for batch in batches:
            self._done += 1
            yield batch
        self.epoch, self._done = epoch + 1, 0

    def _from(self, skip: int) -> Iterator[Batch]:
        batch_sampler = self.loader.batch_sampler
        if isinstance(batch_sampler, _Skipping):
            # Rows that were seen already are not loaded again.
            batch_sampler.skip = skip
            return iter(self.loader)
        return islice(self.loader, skip, None)

    def state_dict(self) -> dict[str, Any]:
        """Where this loader is: put it into a checkpoint, to go on in the middle of an epoch."""
        state = {"epoch": self.epoch, "batches": self._done, "world_size": get_context().world_size}
        if self._is_stateful():
            state["loader"] = self.loader.state_dict()  # type: ignore[attr-defined]
        return state

    def _is_stateful(self) -> bool:
        """A loader of torchdata, whose workers and data set have a state."""
        return hasattr(self.loader, "load_state_dict")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where ``state`` was: the next iteration gives the rest of that epoch.

        After a change of the world size the ranks go on at the same place of the epoch, rounded down to whole batches.
        """
        self.set_epoch(state["epoch"])
        if "loader" in state and self._is_stateful():
            self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
        else:
            self._skip = state["batches"] * state["world_size"] // get_context().world_size


def prepare_data_loader(
    loader: DataLoader[Any], *, shard: bool = True, move: bool = True, pad: bool = True, seed: int = 0
) -> PreparedDataLoader:
    """Gives each rank its share of a loader's data, on its device.

    Every argument of the loader is kept. Each iteration is a new epoch with a new order; a `set_epoch` of the sampler,
    batch sampler or data set is called by itself.

    * A sequential or shuffling loader gets a `torch.utils.data.distributed.DistributedSampler`.
    * Of another sampler, rank 0's order counts: it is drawn once for each epoch, and every rank gets its part of it. So
      are the batches of a custom batch sampler.
    * Of an iterable data set, whose items come in the same order on every rank, each rank gets every n-th item.

    Args:
        loader: The loader of the whole data; its ``batch_size`` is that of one rank.
        shard: False if the data is this rank's share already. A ``DistributedSampler`` is always kept.
        move: Batches are moved to the rank's device, one ahead, on a stream of their own. On a CPU they stay.
        pad: Every rank gets the same number of items, so that no rank waits in a collective for ever: a few items come
            twice, or with the loader's ``drop_last`` not at all. False: every item comes once; see
            ``DistributedDataParallel.join``.
        seed: Of the order.

    Returns:
        The loader to iterate over.

    Raises:
        TypeError: not a DataLoader.

    Example:
        >>> import torch
        >>> import rankzero.train as rt
        >>> data = torch.utils.data.TensorDataset(torch.arange(6.0))
        >>> loader = rt.prepare_data_loader(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
        >>> [len(values) for [values] in loader]
        [4, 2]
    """
    if isinstance(loader, PreparedDataLoader):
        return loader
    if not isinstance(loader, DataLoader):
        raise TypeError(f"prepare_data_loader takes a torch.utils.data.DataLoader, not a {type(loader).__name__}")
    context = get_context()
    # A copy with another sampler keeps what a constructor may not take: workers, prefetching, a subclass's own.
    mine = copy.copy(loader)
    replaced: dict[str, Any] = {"_iterator": None}
    is_sharded = context.world_size > 1 and shard
    if isinstance(loader.dataset, IterableDataset):
        if is_sharded:
            replaced["dataset"] = _ShardedIterable(loader.dataset, context.rank, context.world_size, pad)
    else:
        replaced |= _samplers(loader, seed, shard=is_sharded, pad=pad)
    for name, value in replaced.items():
        # The loader's own __setattr__ refuses these after it was made.
        object.__setattr__(mine, name, value)
    device = context.device if move else None
    return PreparedDataLoader(mine, None if device is None or device.type == "cpu" else device)


def _samplers(loader: DataLoader[Any], seed: int, *, shard: bool, pad: bool) -> dict[str, Any]:
    """The sampler and batch sampler of this rank, for a data set with indices."""
    batches, sampler = loader.batch_sampler, loader.sampler
    if batches is not None and loader.batch_size is None:
        # Not made by the loader itself, of a sampler and a batch size.
        if shard and not isinstance(getattr(batches, "sampler", None), DistributedSampler):
            batches = _DrawnByRankZero(batches, pad=pad, drop=False)
        return {"batch_sampler": _Skipping(batches)}
    if shard and not isinstance(sampler, DistributedSampler):
        sampler = _share_of(loader, seed, pad=pad)
    if batches is None or loader.batch_size is None:
        return {"sampler": sampler}
    plain = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    return {"sampler": sampler, "batch_sampler": _Skipping(plain)}


def _share_of(loader: DataLoader[Any], seed: int, *, pad: bool) -> Sampler[Any]:
    sampler = loader.sampler
    in_order = isinstance(sampler, SequentialSampler)
    shuffled = isinstance(sampler, RandomSampler) and not sampler.replacement and sampler._num_samples is None
    if not pad or not (in_order or shuffled):
        if shuffled:
            sampler = _Permutation(loader.dataset, seed)
        return _DrawnByRankZero(sampler, pad=pad, drop=loader.drop_last)
    context = get_context()
    return DistributedSampler(
        loader.dataset, context.world_size, context.rank, shuffle=shuffled, seed=seed, drop_last=loader.drop_last
    )


class _Permutation(Sampler[int]):
    """All indices, in an order that seed and epoch give."""

    def __init__(self, data: Any, seed: int) -> None:
        self._data = data
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        yield from torch.randperm(len(self), generator=generator).tolist()


class _DrawnByRankZero(Sampler[Any]):
    """This rank's part of what rank 0's sampler gives, of indices or of batches."""

    def __init__(self, sampler: Any, *, pad: bool, drop: bool) -> None:
        self._sampler = sampler
        self._pad = pad
        self._drop = drop

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        context, total = get_context(), len(self._sampler)
        if self._pad:
            return total // context.world_size if self._drop else -(-total // context.world_size)
        return len(range(context.rank, total, context.world_size))

    def __iter__(self) -> Iterator[Any]:
        context = get_context()
        drawn = list(self._sampler) if context.rank == 0 else []
        drawn = broadcast_object(drawn)
        rest = len(drawn) % context.world_size
        if rest and self._pad:
            whole = drawn[:-rest]
            drawn = whole if self._drop else drawn + _repeated(drawn, context.world_size - rest)
        yield from drawn[context.rank :: context.world_size]


def _repeated(items: Sequence[Any], count: int) -> list[Any]:
    return [items[index % len(items)] for index in range(count)]


class _ShardedIterable(IterableDataset[Any]):
    """Every n-th item of a data set, in each loader process."""

    def __init__(self, data: IterableDataset[Any], rank: int, world_size: int, pad: bool) -> None:
        self._data = data
        self._rank = rank
        self._world_size = world_size
        self._pad = pad

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._data, name)

    def __len__(self) -> int:
        total = len(cast(Any, self._data))
        return -(-total // self._world_size) if self._pad else len(range(self._rank, total, self._world_size))

    def __iter__(self) -> Iterator[Any]:
        items = iter(self._data)
        while round_ := list(islice(items, self._world_size)):
            if self._rank < len(round_):
                yield round_[self._rank]
            elif self._pad:
                yield round_[self._rank % len(round_)]


class _Skipping(Sampler[Any]):
    """A batch sampler that begins in the middle, once."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self.skip = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        skip, self.skip = self.skip, 0
        return islice(iter(self._batches), skip, None)


def _on_device(batches: Iterator[Batch], device: torch.device, *, ahead: bool) -> Iterator[Batch]:
    """Each batch on the device; with ``ahead`` the next one is copied on a stream of its own meanwhile."""
    if not ahead:
        yield from (_moved(batch, lambda tensor: tensor.to(device)) for batch in batches)
        return
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy_next() -> list[Batch]:
        with torch.cuda.stream(stream):
            return [_moved(batch, lambda tensor: tensor.to(device, non_blocking=True)) for batch in islice(batches, 1)]

    def read_here(tensor: torch.Tensor) -> torch.Tensor:
        # Memory of the copying stream must not be used again before the training's own has read it.
        tensor.record_stream(torch.cuda.current_stream(device))
        return tensor

    coming = copy_next()
    while coming:
        torch.cuda.current_stream(device).wait_stream(stream)
        batch = _moved(coming[0], read_here)
        coming = copy_next()
        yield batch


def _moved(batch: Batch, move: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """The batch with each tensor in it moved; tuples, named tuples, lists and mappings stay what they are."""
    if isinstance(batch, torch.Tensor):
        return move(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(part, move) for part in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_moved(part, move) for part in batch)
    if isinstance(batch, Mapping):
        moved = {key: _moved(part, move) for key, part in batch.items()}
        if type(batch) is dict:
            return moved
        same = copy.copy(batch)
        cast(Any, same).update(moved)
        return same
    return batch
