"""`prepare_data_loader`: gives each rank its share of the data, in a new order each epoch, on its device, resumable.

The module imports torch, so `rankzero.train` imports it late.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from rankzero.train.batches import on_device
from rankzero.train.context import get_context
from rankzero.train.dataset import Epochs, Position
from rankzero.train.process_group import broadcast_object


class PreparedDataLoader(Epochs):
    """A loader of this rank's share, as `prepare_data_loader` returns it. It has the attributes of ``loader``."""

    def __init__(self, loader: DataLoader[Any], device: torch.device | None, is_shared_out: bool) -> None:
        super().__init__()
        self.loader = loader
        self._is_shared_out = is_shared_out
        self._device = device
        self._sampled = getattr(loader.sampler, "epoch", None)
        self._skips = False

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        sampler, batch_sampler, data = self.loader.sampler, self.loader.batch_sampler, self.loader.dataset
        if isinstance(sampler, DistributedSampler) and sampler.epoch != self._sampled:
            # The training function has set it.
            self.set_epoch(sampler.epoch)
        at = self._begin(data)
        for part in (sampler, batch_sampler, getattr(batch_sampler, "sampler", None), data):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(at.epoch)
        self._sampled = at.epoch
        batches = self._from(at)
        if self._device is not None:
            batches = on_device(batches, self._device)
        yield from self._count(at, batches)

    def _from(self, at: Position) -> Iterator[Any]:
        """Returns the batches behind the position at which an iteration begins."""
        shape = self._shape()
        if at.loaded:
            at.done = self._consumed(at.loaded, shape)
        own = at.loaded.get("loader") if at.loaded and shape.items() <= at.loaded.items() else None
        self._skips = own is None and at.done > 0
        if own is not None:
            self.loader.load_state_dict(own)  # type: ignore[attr-defined]
        if not self._skips:
            return iter(self.loader)
        chosen: Any = None if isinstance(self.loader.dataset, IterableDataset) else self.loader.batch_sampler
        if chosen is None or hasattr(self.loader, "load_state_dict"):
            return islice(self.loader, at.done, None)
        # The rows of the batches that are skipped are not loaded.
        rest = copy.copy(self.loader)
        _replace(rest, batch_sampler=islice(chosen, at.done, None), _iterator=None)
        return iter(rest)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of this loader, for a checkpoint from which training resumes inside an epoch."""
        at = self._at
        if at.data is None and at.loaded is not None:
            return dict(at.loaded)
        state = {"epoch": at.epoch, "batches": at.done, **self._shape()}
        if at.data is not None and hasattr(self.loader, "load_state_dict") and not self._skips:
            # A loader of torchdata, whose workers and data set have a state, but not without batches that were skipped.
            state["loader"] = self.loader.state_dict()  # type: ignore[attr-defined]
        return state

    def _shape(self) -> dict[str, Any]:
        rows, data = None, self.loader.dataset
        with contextlib.suppress(TypeError):
            # Of the whole data, which all ranks have, or unknown for a share.
            rows = len(getattr(data, "_source", data)) if self._is_shared_out else None  # type: ignore[arg-type]
        return {"world_size": get_context().world_size, "batch_size": self.loader.batch_size, "rows": rows}

    def _consumed(self, state: Mapping[str, Any], now: Mapping[str, Any]) -> int:
        """Returns the number of this rank's batches that were consumed in an epoch, perhaps by another world."""
        if state["rows"] != now["rows"]:
            print(f"rankzero: the data set had {state['rows']} rows before; its epoch begins at its first batch")
            return 0
        # Batches of a batch sampler have no size.
        before, size = (state["batch_size"] or 1, now["batch_size"] or 1)
        return int(state["batches"] * state["world_size"] * before // (now["world_size"] * size))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes at the position of ``state``: the next iteration yields the rest of that epoch, which may be empty.

        After a change of the world size or of the batch size the ranks resume at the same position of the epoch,
        rounded down to whole batches. The data and their order have to be the same: that many batches are skipped.
        """
        self._at = Position(state["epoch"], state)


def prepare_data_loader(
    loader: DataLoader[Any], *, shard: bool = True, move: bool = True, seed: int | None = None
) -> PreparedDataLoader:
    """Gives each rank its share of a loader's data, on its device.

    Every argument of the loader is kept. Each iteration is a new epoch with a new order; ``set_epoch`` of the sampler,
    the batch sampler and the data set is called automatically. Every rank gets the same number of items, so that no
    rank blocks in a collective: a few come twice.

    * A sequential or shuffling loader gets a `torch.utils.data.distributed.DistributedSampler`.
    * A sampler with the attributes ``num_replicas`` and ``rank`` is kept.
    * An iterable data set must yield its items in the same order on every rank; each rank gets every n-th item.

    Args:
        loader: The loader of the whole data; its ``batch_size`` is that of one rank.
        shard: False if the data is this rank's share already: the loader's own samplers are kept.
        move: Whether batches are moved to the rank's device.
        seed: Seed of the order. None: the seed of the loader's ``generator``, that of rank 0 for all ranks; else 0.

    Raises:
        TypeError: not a DataLoader, or another sampler or batch sampler.

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
    # A copy with another sampler keeps attributes that a constructor may not accept, such as those of a subclass.
    mine = copy.copy(loader)
    _replace(mine, _iterator=None)
    if shard and isinstance(loader.dataset, IterableDataset):
        _replace(mine, dataset=_ShareOf(loader.dataset, context.rank, context.world_size))
    elif shard:
        if seed is None and loader.generator is not None:
            # The sum with the number of an epoch must remain a seed.
            seed = broadcast_object(loader.generator.initial_seed() % 2**63)
        _replace(mine, **_samplers_of(loader, context.rank, context.world_size, seed or 0))
    device = context.device if move else None
    return PreparedDataLoader(mine, None if device is None or device.type == "cpu" else device, shard)


def _replace(loader: DataLoader[Any], **attributes: Any) -> None:
    for name, value in attributes.items():
        # DataLoader.__setattr__ refuses some names after its constructor.
        object.__setattr__(loader, name, value)


def _samplers_of(loader: DataLoader[Any], rank: int, world_size: int, seed: int) -> dict[str, Any]:
    """Returns the sampler and batch sampler of this rank, for a data set with indices."""
    batches: Any = loader.batch_sampler
    is_own = batches is not None and loader.batch_size is None
    sampler: Any = getattr(batches, "sampler", batches) if is_own else loader.sampler
    if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank") and not hasattr(sampler, "processed_num"):
        # It yields one rank's share, as torch's DistributedSampler does, and not from a position of its own.
        return {}
    # torchdata has a class of its own of this name.
    shuffles = type(sampler).__name__ == "RandomSampler" and not sampler.replacement
    is_whole = shuffles or type(sampler) is SequentialSampler
    if is_own or not is_whole or len(sampler) != len(loader.dataset):  # type: ignore[arg-type]
        raise TypeError(
            f"the order of a {type(batches if is_own else sampler).__name__} cannot be shared out: use the loader as "
            "it is, with a sampler that yields each rank's part, as torch's DistributedSampler does"
        )
    sampler = DistributedSampler(loader.dataset, world_size, rank, shuffle=shuffles, seed=seed)
    plain = None if batches is None else BatchSampler(sampler, loader.batch_size or 1, loader.drop_last)
    return {"sampler": sampler, "batch_sampler": plain}


class _ShareOf(IterableDataset[Any]):
    """Every n-th item of an iterable data set.

    Other attributes are those of the source: a ``worker_init_fn`` may set the bounds of its part.
    """

    def __init__(self, source: Any, rank: int, world_size: int) -> None:
        self._source = source
        self._rank = rank
        self._world_size = world_size

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._source, name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self if name.startswith("_") else self._source, name, value)

    def __len__(self) -> int:
        return -(-len(self._source) // self._world_size)

    def __iter__(self) -> Iterator[Any]:
        items = iter(self._source)
        first: list[Any] = []
        while found := list(islice(items, self._world_size)):
            first = first or found
            found += islice(cycle(first), self._world_size - len(found))
            yield found[self._rank]
