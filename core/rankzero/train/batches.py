"""Batches of tensors from the rows of a dataset: this rank's share of an epoch, which a thread reads ahead."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils._pytree import tree_map

from rankzero.data.columns import Columns, joined, part, rows_of, tensors
from rankzero.data.manifest import Manifest
from rankzero.data.order import Order
from rankzero.data.reader import Reader
from rankzero.data.shares import Batches, Spans, Stretch, cut, length, remaining, share
from rankzero.host import forks

if TYPE_CHECKING:
    from rankzero.train.context import TrainContext

T = TypeVar("T")

_END: Any = object()

PIECE = 16 << 20
"""Approximate number of bytes of shuffled rows that are gathered at a time."""


def batches_of(
    manifest: Manifest,
    world: TrainContext,
    epoch: int,
    consumed: list[Stretch],
    *,
    batch_size: int,
    seed: int | None,
    drop_last: bool,
    columns: Sequence[str] | None,
    collate: Callable[[Columns], Any] | None,
    pad: bool,
    prefetch: int,
) -> Iterator[Any]:
    """Yields the batches of one rank in an epoch of which worlds of any sizes have consumed parts.

    The other arguments are those of `DatasetShard.iter_batches`; ``seed`` is None for the order of the files.
    """
    left = remaining(manifest.rows, consumed)
    total = length(left)
    plan = Batches.of(total, world.world_size, world.rank, batch_size, drop_last=drop_last)
    sizes = [plan.done(number + 1) - plan.done(number) for number in range(plan.count)]
    read = functools.partial(_pieces, manifest, columns, seed, epoch, batch_size)
    mine = cut(share(left, world.world_size, world.rank), 0, plan.done(plan.count))
    for batch in _rebatched(ahead(read(mine), prefetch), sizes if pad else [size for size in sizes if size]):
        if batch is None:
            # The row at the last position, the same on every rank, for a batch without rows.
            batch = next(read(cut(left, total - 1, total) or [(0, 1)]))
        yield batch if collate is None else collate(batch)


def _pieces(
    manifest: Manifest, columns: Sequence[str] | None, seed: int | None, epoch: int, least: int, spans: Spans
) -> Iterator[Columns]:
    """Yields the rows at some positions of the epoch: those of row groups, or pieces of shuffled windows."""
    import pyarrow as pa

    reader = Reader(manifest, columns)
    if seed is None:
        for batch in reader.rows(spans):
            yield tensors(batch, manifest.lengths)
        return
    # A few columns out of many take less memory, so a piece has more rows.
    size = manifest.row_size * len(reader.columns) / len(manifest.arrow_schema().names)
    count = max(least, int(PIECE / max(1.0, size)))
    for window, places in Order(manifest, seed, epoch).parts(spans):
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


def on_device(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Yields each batch with the tensors in it on the device; objects with a method ``to`` move themselves."""

    def move(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part.to(device, non_blocking=True)
        return part.to(device) if hasattr(part, "to") else part

    return (tree_map(move, batch, is_leaf=lambda part: hasattr(part, "to")) for batch in batches)
