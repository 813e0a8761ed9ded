"""`prepare_data_loader`: gives each rank its share of the data, in a new order each epoch, on its device, resumable.

The module imports torch, so `rankzero.train` imports it late.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, cast

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from rankzero.train.batches import ARE_BATCHES, BatchDataset, SampleDataset
from rankzero.train.context import current, get_context
from rankzero.train.epochs import Epochs, Position
from rankzero.train.process_group import broadcast_object
from rankzero.train.share import ShardedIterable, Share, Skipping, samplers_of

Batch = Any


class PreparedDataLoader:
    """A loader of this rank's share, as `prepare_data_loader` returns it. It has the attributes of the original loader.

    Attributes:
        loader: The loader of this rank's share.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device | None) -> None:
        self.loader = loader
        self._epochs = Epochs()
        self._device = device
        self._sampled = getattr(loader.sampler, "epoch", None)

    @property
    def epoch(self) -> int:
        """Returns the number of the epoch that is running or, between two, comes next; from 0."""
        return self._epochs.number

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "_epochs"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration. Optional: each iteration increases the epoch by one.

        A position that was loaded belongs to its epoch: that one is resumed, any other epoch begins at its first batch.
        """
        self._epochs.set_epoch(epoch)

    def __iter__(self) -> Iterator[Batch]:
        sampler, batch_sampler = self.loader.sampler, self.loader.batch_sampler
        if isinstance(sampler, DistributedSampler) and sampler.epoch != self._sampled:
            # The training function has set the epoch itself.
            self.set_epoch(sampler.epoch)
        at = self._epochs.begin()
        for part in (sampler, batch_sampler, getattr(batch_sampler, "sampler", None), self.loader.dataset):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(at.epoch)
        if at.loader is not None:
            # Not earlier, since `set_epoch` may still choose another epoch.
            self.loader.load_state_dict(at.loader)  # type: ignore[attr-defined]
            at.loader = None
        if self._epochs.is_running and self.loader.persistent_workers:
            # The outer loop keeps its processes, which would restart for the inner one.
            self.loader._iterator = None
        data = self.loader.dataset
        if isinstance(data, BatchDataset) and data.consumed != at.consumed:
            # The loader's persistent processes would not see the change.
            data.consumed, self.loader._iterator = at.consumed, None
        self._sampled = at.epoch
        batches = self._from(at.skipped)
        if self._device is not None:
            ahead = self._device.type == "cuda" and not self._is_stateful()
            batches = on_device(batches, self._device, ahead=ahead)
        yield from self._epochs.count(at, batches)

    def _from(self, skip: int) -> Iterator[Batch]:
        batch_sampler = self.loader.batch_sampler
        if isinstance(batch_sampler, Skipping):
            # Skipping in the sampler avoids loading the rows.
            batch_sampler.skip = skip
            return iter(self.loader)
        return islice(self.loader, skip, None)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of this loader, for a checkpoint from which training resumes inside an epoch."""
        at = self._epochs.position()
        if isinstance(data := self.loader.dataset, BatchDataset):
            state = data.state(at.epoch, at.consumed, at.done)
            current().note_position(state)
            return state
        state = {"epoch": at.epoch, "batches": at.done, "world_size": get_context().world_size}
        state |= {"batch_size": self.loader.batch_size, "rows": self._num_rows}
        if at.loader is not None:
            state["loader"] = at.loader
        elif self._is_stateful() and not at.skipped and at.alone:
            # The loader's own state would not contain skipped batches, and is that of its last iteration.
            state["loader"] = self.loader.state_dict()  # type: ignore[attr-defined]
        return state

    @property
    def _num_rows(self) -> int | None:
        return len(self.loader.dataset) if hasattr(self.loader.dataset, "__len__") else None

    def _is_stateful(self) -> bool:
        """Returns True for a loader of torchdata, whose workers and data set have a state."""
        return hasattr(self.loader, "load_state_dict")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes at the position of ``state``: the next iteration yields the rest of that epoch, which may be empty.

        After a change of the world size or of the batch size the ranks resume at the same position of the epoch,
        rounded down to whole batches. The data and their order have to be the same: that many batches are skipped. With
        the data of `DatasetShard.to_torch` every row is used exactly once.
        """
        if isinstance(data := self.loader.dataset, BatchDataset):
            from rankzero.data.shares import Stretch

            data.check(state)
            current().resumed = True
            consumed = [Stretch.from_json(values) for values in state["consumed"]]
            self._epochs.start_at(Position(state["epoch"], consumed=consumed))
            return
        world_size = get_context().world_size
        # States of earlier versions have no batch size, and neither have loaders with a batch sampler.
        before, now = state.get("batch_size") or 0, self.loader.batch_size or 0
        before, now = (before, now) if before and now else (1, 1)
        done = state["batches"] * state["world_size"] * before // (world_size * now)
        if state.get("rows", self._num_rows) != self._num_rows:
            print(f"rankzero: the data set had {state['rows']} rows before; its epoch begins at its first batch")
            done = 0
        at = Position(state["epoch"], done, done)
        if "loader" in state and self._is_stateful() and (state["world_size"], before) == (world_size, now):
            at.skipped, at.loader = 0, state["loader"]
        self._epochs.start_at(at)


def prepare_data_loader(
    loader: DataLoader[Any], *, shard: bool = True, move: bool = True, pad: bool = True, seed: int | None = None
) -> PreparedDataLoader:
    """Gives each rank its share of a loader's data, on its device.

    Every argument of the loader is kept. Each iteration is a new epoch with a new order; ``set_epoch`` of the sampler,
    the batch sampler and the data set is called automatically.

    * A sequential or shuffling loader gets a `torch.utils.data.distributed.DistributedSampler`.
    * Another sampler is drawn on rank 0, once for each epoch, and every rank gets its part of that order. The batches
      of a custom batch sampler are distributed in the same way. Random numbers of torch and Python are seeded for it.
    * A sampler with the attributes ``num_replicas`` and ``rank`` yields this rank's share already, and is kept, as is a
      batch sampler of it. The data of `DatasetShard.to_torch` is this rank's share, too.
    * Another iterable data set must yield its items in the same order on every rank; each rank gets every n-th item.

    Args:
        loader: The loader of the whole data; its ``batch_size`` is that of one rank.
        shard: False if the data is this rank's share already. A ``DistributedSampler`` is always kept.
        move: Whether batches are moved to the rank's device. On CUDA the next batch is copied on a separate stream.
        pad: Whether every rank gets the same number of items, so that no rank blocks in a collective. A few items then
            come twice, or with the loader's ``drop_last`` not at all. False: every item comes exactly once; see
            ``DistributedDataParallel.join``.
        seed: Seed of the order. None: the seed of the loader's ``generator``, that of rank 0 for all ranks; else 0.

    Returns:
        The loader to iterate over.

    Raises:
        TypeError: not a DataLoader; a sampler without a length, for several ranks; Horovod's ``ElasticSampler``, which
            keeps its own position; or a loader of `DatasetShard.to_torch`'s data that would combine batches into
            larger batches.

    Example:
        >>> import torch
        >>> import rankzero.train as rt
        >>> data = torch.utils.data.TensorDataset(torch.arange(6.0))
        >>> loader = rt.prepare_data_loader(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
        >>> [len(values) for [values] in loader]
        [4, 2]
    """
    context = get_context()
    share = Share(context.rank, context.world_size, pad) if shard else Share(0, 1, pad)
    sampler = getattr(loader, "sampler", None)
    # torchdata's sampler makes a generator itself if it gets none, with another seed in each process.
    chooses = loader if type(sampler).__module__.startswith("torchdata.") else sampler
    if seed is None and isinstance(generator := getattr(chooses, "generator", None), torch.Generator):
        # The sum with the number of an epoch must remain a seed.
        seed = generator.initial_seed() % 2**63
        seed = broadcast_object(seed) if shard else seed
    return prepared(loader, share, move=move, seed=seed or 0)


def prepared(loader: DataLoader[Any], share: Share, *, move: bool, seed: int | None) -> PreparedDataLoader:
    """Returns a loader of a share of the data, as `prepare_data_loader` does.

    Args:
        loader: As for `prepare_data_loader`.
        share: The share of the data.
        move: As for `prepare_data_loader`.
        seed: Seed of the order; None keeps the loader's own samplers and their random numbers.

    Raises:
        TypeError: as `prepare_data_loader`.
    """
    if isinstance(loader, PreparedDataLoader):
        return loader
    if not isinstance(loader, DataLoader):
        raise TypeError(f"prepare_data_loader takes a torch.utils.data.DataLoader, not a {type(loader).__name__}")
    is_share = isinstance(loader.dataset, (BatchDataset, SampleDataset))
    if is_share and loader.batch_size is not None:
        raise TypeError(ARE_BATCHES)
    if hasattr(loader.sampler, "processed_num"):
        raise TypeError(
            f"the sampler {type(loader.sampler).__name__} shares out the indices and keeps the position itself, which "
            "the epochs of a prepared loader would clear: use the loader as it is"
        )
    # A copy with another sampler keeps attributes that a constructor may not accept, such as those of a subclass.
    mine = copy.copy(loader)
    replaced: dict[str, Any] = {"_iterator": None}
    if not isinstance(loader.dataset, IterableDataset):
        replaced |= samplers_of(loader, seed, share)
    elif share.world_size > 1 and not is_share:
        replaced["dataset"] = ShardedIterable(loader.dataset, share)
    for name, value in replaced.items():
        # DataLoader.__setattr__ refuses these names after its constructor.
        object.__setattr__(mine, name, value)
    device = get_context().device if move else None
    return PreparedDataLoader(mine, None if device is None or device.type == "cpu" else device)


def on_device(batches: Iterator[Batch], device: torch.device, *, ahead: bool) -> Iterator[Batch]:
    """Yields each batch on the device; with ``ahead`` the next one is copied meanwhile, on a separate CUDA stream."""
    if not ahead:
        yield from (_moved(batch, lambda tensor: tensor.to(device)) for batch in batches)
        return
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy_next() -> list[Batch]:
        with torch.cuda.stream(stream):
            return [_moved(batch, lambda tensor: tensor.to(device, non_blocking=True)) for batch in islice(batches, 1)]

    def read_here(tensor: torch.Tensor) -> torch.Tensor:
        # The copying stream must not reuse this memory before the training's stream has read it.
        tensor.record_stream(torch.cuda.current_stream(device))
        return tensor

    coming = copy_next()
    while coming:
        torch.cuda.current_stream(device).wait_stream(stream)
        batch = _moved(coming[0], read_here)
        coming = copy_next()
        yield batch


def _moved(batch: Batch, move: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """Returns a batch with each tensor in it moved; tuples, named tuples, lists and mappings keep their types."""
    if isinstance(batch, torch.Tensor):
        return move(batch)
    if isinstance(batch, PackedSequence):
        # The batch sizes of this named tuple must stay on the CPU.
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
