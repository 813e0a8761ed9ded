"""`prepare_data_loader`: each rank its share of the data, in every epoch another order, on its device, resumable.

Imports torch, so `rankzero.train` imports it late.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch
from torch.nn.utils.rnn import PackedSequence
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
        self._skipped = 0
        self._start = 0
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
        self._done, self._start = self._start, 0
        self._skipped, self._skip = self._skip, 0
        for part in (sampler, batch_sampler, getattr(batch_sampler, "sampler", None), self.loader.dataset):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
        self._sampled = epoch
        batches = self._from(self._skipped)
        if self._device is not None:
            ahead = self._device.type == "cuda" and not self._is_stateful()
            batches = on_device(batches, self._device, ahead=ahead)
        for batch in batches:
            self._done += 1
            yield batch
        self.epoch, self._done, self._skipped = epoch + 1, 0, 0

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
        if self._is_stateful() and not self._skipped:
            # The loader itself does not know of what was skipped.
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
        world_size = get_context().world_size
        self._start = self._skip = state["batches"] * state["world_size"] // world_size
        if "loader" in state and self._is_stateful() and state["world_size"] == world_size:
            self._skip = 0
            self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]


def prepare_data_loader(
    loader: DataLoader[Any], *, shard: bool = True, move: bool = True, pad: bool = True, seed: int = 0
) -> PreparedDataLoader:
    """Gives each rank its share of a loader's data, on its device.

    Every argument of the loader is kept. Each iteration is a new epoch with a new order; a `set_epoch` of the sampler,
    batch sampler or data set is called by itself.

    * A sequential or shuffling loader gets a `torch.utils.data.distributed.DistributedSampler`.
    * Of another sampler, rank 0's order counts: it is drawn once for each epoch, and every rank gets its part of it. So
      are the batches of a custom batch sampler. Random numbers of torch and Python are seeded for it.
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
        TypeError: not a DataLoader, or a sampler without a length for several ranks.

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
    share = Share(context.rank, context.world_size, pad) if shard else Share(0, 1, pad)
    if not isinstance(loader.dataset, IterableDataset):
        replaced |= _samplers(loader, seed, share)
    elif share.world_size > 1:
        replaced["dataset"] = _ShardedIterable(loader.dataset, share)
    for name, value in replaced.items():
        # The loader's own __setattr__ refuses these after it was made.
        object.__setattr__(mine, name, value)
    device = context.device if move else None
    return PreparedDataLoader(mine, None if device is None or device.type == "cpu" else device)


@dataclass(frozen=True)
class Share:
    """Which part of the data is a rank's."""

    rank: int
    world_size: int
    pad: bool

    def count(self, total: int, *, drop: bool = False) -> int:
        """Its items of ``total``; with ``drop`` only as many as every rank has."""
        if self.pad:
            return total // self.world_size if drop else -(-total // self.world_size)
        return len(range(self.rank, total, self.world_size))

    def of(self, items: list[Any], *, drop: bool = False) -> list[Any]:
        """Its items."""
        rest = len(items) % self.world_size
        if rest and self.pad:
            missing = self.world_size - rest
            items = items[:-rest] if drop else items + [items[index % len(items)] for index in range(missing)]
        return items[self.rank :: self.world_size]


def _samplers(loader: DataLoader[Any], seed: int, share: Share) -> dict[str, Any]:
    """The sampler and batch sampler of this rank, for a data set with indices."""
    batches, sampler = loader.batch_sampler, loader.sampler
    if batches is not None and loader.batch_size is None:
        # Not made by the loader itself, of a sampler and a batch size.
        if not isinstance(getattr(batches, "sampler", None), DistributedSampler):
            batches = _drawn(batches, seed, share, drop=False)
        return {"batch_sampler": _Skipping(batches)}
    if not isinstance(sampler, DistributedSampler):
        sampler = _share_of(loader, seed, share)
    if batches is None or loader.batch_size is None:
        return {"sampler": sampler}
    plain = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    return {"sampler": sampler, "batch_sampler": _Skipping(plain)}


def _share_of(loader: DataLoader[Any], seed: int, share: Share) -> Any:
    sampler: Any = loader.sampler
    shuffled = _is_random(sampler) and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    if not share.pad or not (shuffled or type(sampler) is SequentialSampler) or not _is_of_all(sampler, loader.dataset):
        return _drawn(sampler, seed, share, drop=loader.drop_last)
    return DistributedSampler(
        loader.dataset, share.world_size, share.rank, shuffle=shuffled, seed=seed, drop_last=loader.drop_last
    )


def _is_random(sampler: Any) -> bool:
    """A RandomSampler of torch, or the one that torchdata's loader has of its own; not what somebody made of it."""
    kind = type(sampler)
    return kind is RandomSampler or (kind.__name__ == "RandomSampler" and kind.__module__.startswith("torchdata."))


def _is_of_all(sampler: Any, data: Any) -> bool:
    return hasattr(data, "__len__") and len(sampler.data_source) == len(data)


def _drawn(sampler: Any, seed: int, share: Share, *, drop: bool) -> Any:
    if hasattr(sampler, "__len__"):
        return _DrawnByRankZero(sampler, seed, share, drop=drop)
    if share.world_size > 1:
        raise TypeError(
            f"a {type(sampler).__name__} without a length cannot be shared out: give it __len__, or prepare the "
            "loader with shard=False"
        )
    return sampler


class _DrawnByRankZero(Sampler[Any]):
    """This rank's part of what rank 0's sampler gives, of indices or of batches."""

    def __init__(self, sampler: Any, seed: int, share: Share, *, drop: bool) -> None:
        self._sampler = sampler
        self._seed = seed
        self._share = share
        self._drop = drop
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if callable(set_epoch := getattr(self._sampler, "set_epoch", None)):
            set_epoch(epoch)

    def __len__(self) -> int:
        return self._share.count(len(self._sampler), drop=self._drop)

    def __iter__(self) -> Iterator[Any]:
        drawn: list[Any] = []
        if self._share.rank == 0:
            drawn = self._draw()
        if self._share.world_size > 1:
            drawn = broadcast_object(drawn)
        return iter(self._share.of(drawn, drop=self._drop))

    def _draw(self) -> list[Any]:
        """The order of this epoch, the same again when training resumes in the middle of it."""
        seed, state = self._seed + self._epoch, random.getstate()
        if isinstance(generator := getattr(self._sampler, "generator", None), torch.Generator):
            generator.manual_seed(seed)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                random.seed(seed)
                return list(self._sampler)
        finally:
            random.setstate(state)


class _ShardedIterable(IterableDataset[Any]):
    """Every n-th item of a data set, in each loader process. Else it is that data set, for a `worker_init_fn`, too."""

    def __init__(self, data: IterableDataset[Any], share: Share) -> None:
        self._data = data
        self._share = share

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._data, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            setattr(self._data, name, value)

    def __delattr__(self, name: str) -> None:
        if name.startswith("_"):
            super().__delattr__(name)
        else:
            delattr(self._data, name)

    def __len__(self) -> int:
        return self._share.count(len(cast(Any, self._data)))

    def __iter__(self) -> Iterator[Any]:
        items = iter(self._data)
        while round_ := list(islice(items, self._share.world_size)):
            yield from self._share.of(round_)


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
        # Of two iterators that a loader with processes makes, it reads one: a generator skips where it is read.
        skip, self.skip = self.skip, 0
        yield from islice(iter(self._batches), skip, None)


def on_device(batches: Iterator[Batch], device: torch.device, *, ahead: bool) -> Iterator[Batch]:
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
    if isinstance(batch, PackedSequence):
        # A named tuple whose batch sizes must stay on the CPU.
        return type(batch)(move(batch.data), batch.batch_sizes, *(_moved(indices, move) for indices in batch[2:]))
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
