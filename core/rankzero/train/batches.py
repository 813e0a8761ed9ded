"""Batches of tensors from the rows of a dataset: this rank's share of an epoch, which a thread reads ahead."""

from __future__ import annotations

import atexit
import itertools
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.data import IterableDataset, get_worker_info

from rankzero import bounds
from rankzero.data.columns import Columns, joined, part, rows_of, tensors
from rankzero.data.manifest import Manifest
from rankzero.data.order import Order
from rankzero.data.reader import Reader
from rankzero.data.shares import Batches, Spans, Stretch, cut, length, merged, remaining, share
from rankzero.host import forks

if TYPE_CHECKING:
    from rankzero.train.context import TrainContext

READ_AHEAD_EXIT_TIMEOUT = bounds.stretched(5.0)  # For which a process that exits waits for a piece that is being read

T = TypeVar("T")

_END = object()

_threads: dict[threading.Thread, threading.Event] = {}
"""The running threads, each with the event that stops it."""

PIECE = 16 << 20
"""Approximate number of bytes of shuffled rows that are gathered at a time."""


ARE_BATCHES = "the data of to_torch are batches already: give its DataLoader batch_size=None"


@dataclass(frozen=True)
class Cut:
    """The options with which `DatasetShard.iter_batches` iterates over a dataset.

    Attributes:
        batch_size: Rows of a batch.
        seed: Seed of the order; None for the order of the files.
        drop_last: Whether to leave out a last batch that is smaller.
        columns: Names of the columns that are read; None for all.
        collate: Makes a batch from the dict of columns; None: the dict is the batch.
        prefetch: Pieces that a thread reads ahead.
        pad: Whether a rank that has no row for a last batch gets one a second time, so that all ranks have the same
            number of batches.
    """

    batch_size: int
    seed: int | None
    drop_last: bool
    columns: tuple[str, ...] | None
    collate: Callable[[Columns], Any] | None
    prefetch: int
    pad: bool


def check_order(state: Mapping[str, Any], seed: int | None) -> None:
    """Raises ValueError if a position in an epoch is one of another order."""
    before = state.get("seed", seed)
    if state["consumed"] and before != seed:
        was, now = (
            "the order of the files" if each is None else f"shuffle=True, seed={each}" for each in (before, seed)
        )
        raise ValueError(
            f"the position is one in another order of the rows ({was}) than that of this iteration ({now}): some rows "
            "would come twice, and some never. Give the same shuffle and seed in every attempt"
        )


def batches_of(
    manifest: Manifest,
    world: TrainContext,
    asked: Cut,
    epoch: int,
    left: Spans,
    part_of: range | None = None,
) -> Iterator[Any]:
    """Yields the batches of one rank in the rest of an epoch.

    Args:
        manifest: The dataset.
        world: The rank and the world size.
        asked: The options of the iteration.
        epoch: Number of the epoch.
        left: Positions of the epoch that no rank has consumed.
        part_of: Numbers of the batches to yield; None for all.
    """
    total = length(left)
    plan = Batches.of(total, world.world_size, world.rank, asked.batch_size, drop_last=asked.drop_last)
    mine = share(left, world.world_size, world.rank)
    numbers = range(plan.count) if part_of is None else part_of
    sizes = [plan.done(number + 1) - plan.done(number) for number in numbers if number < plan.count]
    if not asked.pad:
        sizes = [size for size in sizes if size]
    spans: Spans = []
    for number in numbers:
        if number < plan.count:
            spans += cut(mine, plan.done(number), plan.done(number + 1))
    spans = merged(spans)

    def pieces(spans: Spans) -> Iterator[Columns]:
        reader = Reader(manifest, asked.columns)
        for batch in _record_batches(manifest, reader, asked, epoch, spans):
            yield tensors(batch, manifest.lengths)

    def again() -> Columns:
        """Returns one row for a batch without rows: the row at the last remaining position, the same on every rank."""
        return next(pieces(cut(left, total - 1, total) or [(0, 1)]))

    made = _rebatched(ahead(lambda: pieces(spans), asked.prefetch), sizes, again)
    yield from (made if asked.collate is None else map(asked.collate, made))


def _record_batches(manifest: Manifest, reader: Reader, asked: Cut, epoch: int, spans: Spans) -> Iterator[Any]:
    """Yields the rows at some positions: those of row groups, or pieces of shuffled windows."""
    if asked.seed is None:
        yield from reader.rows(spans)
        return
    import pyarrow as pa

    # A few columns out of many take less memory, so a piece has more rows.
    size = manifest.row_size * len(reader.columns) / len(manifest.arrow_schema().names)
    count = max(asked.batch_size, int(PIECE / max(1.0, size)))
    for window, places in Order(manifest, asked.seed, epoch).parts(spans):
        batch = reader.window(window)
        for part_of_window in torch.split(places, count):
            yield batch.take(pa.array(part_of_window.numpy()))
        # Not beside the next one.
        del batch


def _rebatched(pieces: Iterator[Columns], sizes: list[int], again: Any) -> Iterator[Columns]:
    """Yields batches of the given sizes from pieces of any number of rows; a batch of size 0 is ``again()``."""
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
        if not parts:
            yield again()
        elif len(parts) == 1:
            yield parts[0]
        else:
            yield {name: joined([columns[name] for columns in parts], name) for name in parts[0]}


@atexit.register
def _stop_all() -> None:
    """Stops all threads, since an interpreter aborts if it exits while one of its threads runs native code."""
    for stopped in list(_threads.values()):
        stopped.set()
    for thread in list(_threads):
        thread.join(READ_AHEAD_EXIT_TIMEOUT())


def ahead(make: Callable[[], Iterator[T]], count: int) -> Iterator[T]:
    """Yields the items of an iterator, up to ``count`` of which a thread produces in advance.

    The thread ends after the last item, or when this generator is closed.

    Args:
        make: Creates the iterator, in the thread.
        count: Most items that are produced in advance; 0 for no thread.
    """
    if not count:
        yield from make()
        return
    items: queue.Queue[Any] = queue.Queue(count)
    stopped = threading.Event()

    def put(item: object) -> bool:
        while not stopped.is_set():
            try:
                items.put(item, timeout=bounds.POLL_INTERVAL_LONG)
                return True
            except queue.Full:
                continue
        return False

    def produce() -> None:
        try:
            iterator, item = make(), None
            while item is not _END:
                with forks.held():
                    item = next(iterator, _END)
                if not put((item, None)):
                    return
        except BaseException as error:
            put((_END, error))
        finally:
            _threads.pop(threading.current_thread(), None)

    thread = threading.Thread(target=produce, name="rankzero-reader", daemon=True)
    _threads[thread] = stopped
    thread.start()
    try:
        while True:
            item, error = items.get()
            if error is not None:
                raise error
            if item is _END:
                return
            yield item
    finally:
        stopped.set()


class BatchDataset(IterableDataset[Any]):
    """The batches of a rank's share, for a ``DataLoader`` with ``batch_size=None``. See `DatasetShard.to_torch`.

    Attributes:
        consumed: Parts of the next epoch that were consumed already, by worlds of any sizes.
    """

    def __init__(self, manifest: Manifest, world: TrainContext, asked: Cut) -> None:
        self._manifest = manifest
        self._world = world
        self._asked = asked
        # In shared memory, since the processes of a loader may live for many epochs.
        self._epoch = torch.zeros((), dtype=torch.int64, device="cpu").share_memory_()  # type: ignore[no-untyped-call]
        self.consumed: list[Stretch] = []

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration."""
        self._epoch.fill_(epoch)

    def state(self, epoch: int, consumed: list[Stretch], done: int) -> dict[str, Any]:
        """Returns the position of all ranks in an epoch, as `DatasetShard.state_dict` does.

        Args:
            epoch: Number of the epoch.
            consumed: Parts of the epoch that were consumed before this iteration.
            done: Batches that every rank has had in this iteration.
        """
        asked = self._asked
        now = [Stretch(self._world.world_size, asked.batch_size, asked.drop_last, done)] if done else []
        found = [stretch.to_json() for stretch in (*consumed, *now)]
        return {"epoch": epoch, "consumed": found, "rows": self._manifest.rows, "seed": asked.seed}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for the state of another dataset, or of another order."""
        if (rows := state.get("rows")) != self._manifest.rows:
            raise ValueError(f"the state is that of a dataset of {rows} rows; this one has {self._manifest.rows}")
        check_order(state, self._asked.seed)

    def __len__(self) -> int:
        """Returns the number of batches of this rank in an epoch."""
        plan = self._plan()
        # A rank with fewer rows than batches has one batch for each row.
        return plan.count if self._asked.pad else min(plan.count, plan.own)

    def _plan(self) -> Batches:
        world, asked = self._world, self._asked
        total = self._manifest.rows
        return Batches.of(total, world.world_size, world.rank, asked.batch_size, drop_last=asked.drop_last)

    def __iter__(self) -> Iterator[Any]:
        if getattr(sys._getframe(1).f_locals.get("self"), "auto_collation", False):
            # The caller is the fetcher of a loader with a batch size of its own, which would stack batches.
            raise TypeError(ARE_BATCHES)
        return self._own()

    def _own(self) -> Iterator[Any]:
        worker = get_worker_info()
        # Not up to the length: in the rest of an epoch, a rank may have a row more than in the whole one.
        yield from self.all(None if worker is None else range(worker.id, self._plan().count, worker.num_workers))

    def all(self, numbers: range | None = None) -> Iterator[Any]:
        """Yields the batches with the given numbers; None: all, also in a process of a loader."""
        left = remaining(self._manifest.rows, self.consumed)
        epoch = int(self._epoch)
        return batches_of(self._manifest, self._world, self._asked, epoch, left, numbers)


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
        rounds = itertools.chain.from_iterable(self._data.all() for _ in itertools.repeat(None))
        for batch in itertools.islice(_rebatched(rounds, self._sizes, dict), first, None, step):
            yield list(batch.values())
