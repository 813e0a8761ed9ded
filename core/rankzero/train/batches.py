"""Batches of tensors from the rows of a dataset: this rank's share of an epoch, which a thread reads ahead."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.data import IterableDataset, get_worker_info

from rankzero.data.columns import Columns, joined, part, rows_of, tensors
from rankzero.data.manifest import Manifest
from rankzero.data.order import Order
from rankzero.data.reader import Reader
from rankzero.data.shares import Batches, Spans, Stretch, cut, length, merged, remaining, share
from rankzero.host import forks

if TYPE_CHECKING:
    from rankzero.train.context import TrainContext
    from rankzero.train.epochs import Position

T = TypeVar("T")

_END: Any = object()

PIECE = 16 << 20
"""Approximate number of bytes of shuffled rows that are gathered at a time."""


@dataclass(frozen=True)
class Cut:
    """The options with which `DatasetShard.iter_batches` iterates over a dataset.

    Attributes:
        batch_size: Rows of a batch.
        seed: Seed of the order; None for the order of the files.
        drop_last: Whether to leave out a last batch that is smaller.
        columns: Names of the columns that are read; None for all.
        collate: Makes a batch from the dict of columns; None: the dict is the batch.
        pad: Whether a rank that has no row for a last batch gets one a second time, so that all ranks have the same
            number of batches.
    """

    batch_size: int
    seed: int | None
    drop_last: bool
    columns: tuple[str, ...] | None
    collate: Callable[[Columns], Any] | None
    pad: bool


class BatchDataset(IterableDataset[Any]):
    """The batches of a rank's share, for a ``DataLoader`` with ``batch_size=None``. See `DatasetShard.to_torch`."""

    def __init__(self, manifest: Manifest, world: TrainContext, asked: Cut) -> None:
        self._manifest = manifest
        self._world = world
        self._asked = asked
        # In shared memory, since the processes of a loader may live for many epochs.
        self._epoch = torch.zeros((), dtype=torch.int64, device="cpu").share_memory_()  # type: ignore[no-untyped-call]
        self._consumed: list[Stretch] = []

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration."""
        self._epoch.fill_(epoch)

    def start_at(self, state: Mapping[str, Any] | None) -> bool:
        """Sets the position of the next iteration; returns True if another part of the epoch remains than before.

        Args:
            state: What `state` returned for a checkpoint; None for the beginning of the epoch.

        Raises:
            ValueError: the state is that of another dataset, or of another order.
        """
        before, self._consumed = self._consumed, []
        if state is None:
            return before != []
        if (rows := state.get("rows")) != self._manifest.rows:
            raise ValueError(f"the state is that of a dataset of {rows} rows; this one has {self._manifest.rows}")
        seeds = (state.get("seed", self._asked.seed), self._asked.seed)
        if state["consumed"] and seeds[0] != seeds[1]:
            was, now = ("the order of the files" if seed is None else f"shuffle=True, seed={seed}" for seed in seeds)
            raise ValueError(
                f"the position is one in another order of the rows ({was}) than that of this iteration ({now}): some "
                "rows would come twice, and some never. Give the same shuffle and seed in every attempt"
            )
        self._consumed = [Stretch.from_json(values) for values in state["consumed"]]
        return before != self._consumed

    def state(self, at: Position) -> dict[str, Any]:
        """Returns a position of all ranks in an epoch, for a checkpoint."""
        asked, consumed = self._asked, list(at.loaded["consumed"]) if at.loaded else []
        if at.done:
            consumed.append(Stretch(self._world.world_size, asked.batch_size, asked.drop_last, at.done).to_json())
        return {"epoch": at.epoch, "consumed": consumed, "rows": self._manifest.rows, "seed": asked.seed}

    def __len__(self) -> int:
        """Returns the number of batches of this rank in an epoch."""
        plan = self._plan(self._manifest.rows)
        # A rank with fewer rows than batches has one batch for each row.
        return plan.count if self._asked.pad else min(plan.count, plan.own)

    def _plan(self, rows: int) -> Batches:
        world, asked = self._world, self._asked
        return Batches.of(rows, world.world_size, world.rank, asked.batch_size, drop_last=asked.drop_last)

    def __iter__(self) -> Iterator[Any]:
        if getattr(sys._getframe(1).f_locals.get("self"), "auto_collation", False):
            # The caller is the fetcher of a loader with a batch size of its own, which would stack batches.
            raise TypeError("the data of to_torch are batches already: give its DataLoader batch_size=None")
        worker = get_worker_info()
        # Not up to the length: in the rest of an epoch, a rank may have a row more than in the whole one.
        numbers = range(worker.id, self._plan(self._manifest.rows).count, worker.num_workers) if worker else None
        return self.batches(numbers)

    def batches(self, numbers: range | None = None, prefetch: int = 0) -> Iterator[Any]:
        """Yields the batches of this rank in the rest of the epoch.

        Args:
            numbers: Numbers of the batches; None for all.
            prefetch: Pieces that a thread reads ahead.
        """
        world, asked = self._world, self._asked
        left = remaining(self._manifest.rows, self._consumed)
        total = length(left)
        plan = self._plan(total)
        chosen = [number for number in (range(plan.count) if numbers is None else numbers) if number < plan.count]
        sizes = [plan.done(number + 1) - plan.done(number) for number in chosen]
        mine, spans = share(left, world.world_size, world.rank), Spans()
        for number in chosen:
            spans += cut(mine, plan.done(number), plan.done(number + 1))
        pieces = ahead(self._pieces(merged(spans)), prefetch)
        for batch in _rebatched(pieces, sizes if asked.pad else [size for size in sizes if size]):
            if batch is None:
                # The row at the last position, the same on every rank, for a batch without rows.
                batch = next(self._pieces(cut(left, total - 1, total) or [(0, 1)]))
            yield batch if asked.collate is None else asked.collate(batch)

    def _pieces(self, spans: Spans) -> Iterator[Columns]:
        """Yields the rows at some positions of the epoch: those of row groups, or pieces of shuffled windows."""
        import pyarrow as pa

        manifest, asked = self._manifest, self._asked
        reader = Reader(manifest, asked.columns)
        if asked.seed is None:
            for batch in reader.rows(spans):
                yield tensors(batch, manifest.lengths)
            return
        # A few columns out of many take less memory, so a piece has more rows.
        size = manifest.row_size * len(reader.columns) / len(manifest.arrow_schema().names)
        count = max(asked.batch_size, int(PIECE / max(1.0, size)))
        for window, places in Order(manifest, asked.seed, int(self._epoch)).parts(spans):
            batch = reader.window(window)
            for part_of_window in torch.split(places, count):
                yield tensors(batch.take(pa.array(part_of_window.numpy())), manifest.lengths)
            # Not beside the next one.
            del batch


def _rebatched(pieces: Iterator[Columns], sizes: list[int]) -> Iterator[Columns | None]:
    """Yields batches of the given sizes from pieces of any number of rows; None for a batch of size 0."""
    piece: Columns = {}
    at = end = 0
    for size in sizes:
        parts: list[Columns] = []
        missing = size
        while missing:
            if at == end:
                piece = next(pieces)
                at, end = 0, rows_of(piece)
            taken = min(missing, end - at)
            parts.append({name: part(column, at, at + taken) for name, column in piece.items()})
            at += taken
            missing -= taken
        if len(parts) > 1:
            yield {name: joined([columns[name] for columns in parts], name) for name in parts[0]}
        else:
            yield parts[0] if parts else None


def ahead(items: Iterator[T], count: int) -> Iterator[T]:
    """Yields the items of an iterator, up to ``count`` of which a thread produces in advance; 0 for no thread."""
    if not count:
        yield from items
        return

    def produce() -> T:
        with forks.held():
            return next(items, _END)

    # The interpreter joins its thread at exit: it would abort while the thread runs native code.
    pool = ThreadPoolExecutor(1, "rankzero-reader")
    try:
        waiting: deque[Future[T]] = deque(pool.submit(produce) for _ in range(count))
        while (item := waiting.popleft().result()) is not _END:
            waiting.append(pool.submit(produce))
            yield item
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class SampleDataset(IterableDataset[Any]):
    """Yields ``num_samples`` rows of a rank's share as lists of columns; after the last row it restarts."""

    def __init__(self, data: BatchDataset, num_samples: int, batch_size: int) -> None:
        self._data = data
        self._sizes = [min(batch_size, num_samples - low) for low in range(0, num_samples, batch_size)]

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        # Each process of the loader makes all batches and yields its own: a batch may continue in the next round.
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        rounds = itertools.chain.from_iterable(self._data.batches() for _ in itertools.repeat(None))
        for batch in itertools.islice(_rebatched(rounds, self._sizes), first, None, step):
            yield list((batch or {}).values())
