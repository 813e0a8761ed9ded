"""Samplers and iterables that yield a rank's share of the data, in an order that all ranks agree on.

The module imports torch, so `rankzero.train` imports it late.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from rankzero.train.process_group import broadcast_object


@dataclass(frozen=True)
class Share:
    """Computes which items of the data are a rank's: every ``world_size``-th one, starting at ``rank``.

    Attributes:
        rank: The rank.
        world_size: Number of ranks.
        pad: Whether every rank has the same number of items.
        drop: Whether a loader's ``drop_last`` drops the last items instead of repeating the first ones.
    """

    rank: int
    world_size: int
    pad: bool
    drop: bool = True

    def count(self, total: int, *, drop: bool = False) -> int:
        """Returns the number of this rank's items of ``total``; with ``drop`` at most as many as every rank has."""
        if self.pad:
            return total // self.world_size if drop else -(-total // self.world_size)
        return len(range(self.rank, total, self.world_size))

    def of(self, items: list[Any], *, drop: bool = False) -> list[Any]:
        """Returns this rank's items; with ``pad`` repeats the first items, or drops the last ones with ``drop``."""
        rest = len(items) % self.world_size
        if rest and self.pad:
            missing = self.world_size - rest
            items = items[:-rest] if drop else items + [items[index % len(items)] for index in range(missing)]
        return items[self.rank :: self.world_size]


def samplers_of(loader: DataLoader[Any], seed: int | None, share: Share) -> dict[str, Any]:
    """Returns the sampler and batch sampler of this rank, for a data set with indices.

    Args:
        loader: The loader of the whole data.
        seed: Seed of the order; None keeps the loader's own samplers and their random numbers.
        share: The rank's share.
    """
    batches, sampler = loader.batch_sampler, loader.sampler
    if seed is None:
        return {} if batches is None else {"batch_sampler": Skipping(batches)}
    if batches is not None and loader.batch_size is None:
        # The user has passed a batch sampler, or one is the sampler of a loader without batch size.
        if not _is_distributed(getattr(batches, "sampler", None)):
            batches = _drawn(batches, seed, share, drop=False)
        return {"batch_sampler": Skipping(batches)}
    if not _is_distributed(sampler):
        sampler = _share_of(loader, seed, share)
    if batches is None or loader.batch_size is None:
        return {"sampler": sampler}
    plain = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    return {"sampler": sampler, "batch_sampler": Skipping(plain)}


def _is_distributed(sampler: Any) -> bool:
    """Returns True for a sampler of one rank's share: torch's, or another one with its attributes."""
    return isinstance(sampler, DistributedSampler) or (hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"))


def _share_of(loader: DataLoader[Any], seed: int, share: Share) -> Any:
    sampler: Any = loader.sampler
    drop = loader.drop_last and share.drop
    shuffled = _is_random(sampler) and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    if not share.pad or not (shuffled or type(sampler) is SequentialSampler) or not _is_of_all(sampler, loader.dataset):
        return _drawn(sampler, seed, share, drop=drop)
    return DistributedSampler(loader.dataset, share.world_size, share.rank, shuffle=shuffled, seed=seed, drop_last=drop)


def _is_random(sampler: Any) -> bool:
    """Returns True for torch's RandomSampler or torchdata's, and False for a subclass."""
    kind = type(sampler)
    return kind is RandomSampler or (kind.__name__ == "RandomSampler" and kind.__module__.startswith("torchdata."))


def _is_of_all(sampler: Any, data: Any) -> bool:
    return hasattr(data, "__len__") and len(sampler.data_source) == len(data)


def _drawn(sampler: Any, seed: int, share: Share, *, drop: bool) -> Any:
    if hasattr(sampler, "__len__"):
        return DrawnByRankZero(sampler, seed, share, drop=drop)
    if share.world_size > 1:
        raise TypeError(
            f"a {type(sampler).__name__} without a length cannot be shared out: give it __len__, or prepare the "
            "loader with shard=False"
        )
    return sampler


class DrawnByRankZero(Sampler[Any]):
    """Yields this rank's part of the indices, or batches, that rank 0's sampler yields, drawn once for an epoch."""

    def __init__(self, sampler: Any, seed: int, share: Share, *, drop: bool) -> None:
        self._sampler = sampler
        self._seed = seed
        self._share = share
        self._drop = drop
        self._epoch = 0
        self._drawn: list[Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, which has an order of its own."""
        if epoch != self._epoch:
            self._drawn = None
        self._epoch = epoch
        if callable(set_epoch := getattr(self._sampler, "set_epoch", None)):
            set_epoch(epoch)

    def __len__(self) -> int:
        return self._share.count(len(self._sampler), drop=self._drop)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._share.of(self._of_epoch(), drop=self._drop))

    def _of_epoch(self) -> list[Any]:
        if self._drawn is None:
            drawn = self._draw() if self._share.rank == 0 else []
            self._drawn = broadcast_object(drawn) if self._share.world_size > 1 else drawn
        return self._drawn

    def _draw(self) -> list[Any]:
        """Returns the order of this epoch, which is the same when training resumes inside the epoch."""
        seed, state = self._seed + self._epoch, random.getstate()
        # Only where the user has imported it.
        numbers = getattr(sys.modules.get("numpy"), "random", None)
        numpy_state = numbers.get_state() if numbers else None
        generator: Any = getattr(self._sampler, "generator", None)
        own = generator.get_state() if isinstance(generator, torch.Generator) else None
        try:
            if own is not None:
                generator.manual_seed(seed)
            with torch.random.fork_rng(devices=[]):
                # Unlike torch.manual_seed it leaves the random numbers of GPUs as they are, such as those of dropout.
                torch.default_generator.manual_seed(seed)
                random.seed(seed)
                if numbers:
                    numbers.seed(seed % 2**32)
                return list(self._sampler)
        finally:
            if own is not None:
                generator.set_state(own)
            random.setstate(state)
            if numbers:
                numbers.set_state(numpy_state)


class ShardedIterable(IterableDataset[Any]):
    """Yields every n-th item of a data set, in each loader process. All attributes are those of the data set."""

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


class Skipping(Sampler[Any]):
    """A batch sampler whose next iteration skips the first ``skip`` batches."""

    def __init__(self, batches: Any) -> None:
        self.inner = batches
        self.skip = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        # A loader with processes makes two iterators and reads one: a generator skips only when it is read.
        skip, self.skip = self.skip, 0
        yield from islice(iter(self.inner), skip, None)
