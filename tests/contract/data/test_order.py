"""The order of an epoch: each row once, another in each epoch, the same for a seed, from everywhere."""

import itertools
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankzero.data import order
from rankzero.data.manifest import File, Manifest, encode_schema
from rankzero.data.order import Order
from rankzero.data.shares import Batches, split
from rankzero.submit.datasets import manifest_of_path
from rankzero.train import DatasetShard, TrainContext


def manifest_of(groups: list[int], row_size: int) -> Manifest:
    schema = encode_schema(pa.schema({"x": pa.int64(), "y": pa.int64()}))
    return Manifest(schema=schema, files=(File("a", tuple(groups)),), size=sum(groups) * row_size, digest="")


def rows_of(manifest: Manifest, seed: int, epoch: int = 0, step: int = 1000) -> list[int]:
    """The rows of an epoch, asked for in spans of this length."""
    starts = [0, *itertools.accumulate(manifest.files[0].rows)]
    found: list[int] = []
    spans = [(low, min(low + step, manifest.rows)) for low in range(0, manifest.rows, step)]
    for pieces, places in Order(manifest, seed, epoch).parts(spans):
        numbers = torch.cat([torch.arange(piece.length) + piece.low + starts[piece.group] for piece in pieces])
        found += numbers[places].tolist()
    return found


def test_a_dataset_that_fits_is_shuffled_as_a_whole() -> None:
    manifest = manifest_of([1000] * 5, 8)
    first, second = rows_of(manifest, 1), rows_of(manifest, 1, epoch=1)
    assert sorted(first) == sorted(second) == list(range(5000))
    assert first != second
    assert first == rows_of(manifest, 1, step=7)
    assert first != rows_of(manifest, 2)
    assert max(first[:100]) > 4000
    assert min(first[:100]) < 1000


@pytest.mark.parametrize(
    ("groups", "drawn"),
    [([100] * 4000, 40), ([100] * 33, 16), ([1000] * 400, 8), ([100] * 1000 + [20_000], 33), ([20_000, 99_999], 1)],
    ids=["many", "few", "larger", "one large", "huge"],
)
def test_a_larger_one_is_shuffled_within_windows_that_draw_from_many_groups_and_have_a_size(
    groups: list[int], drawn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = sum(groups) // 2 if len(groups) == 33 else 8192
    monkeypatch.setattr(order, "WINDOW", 64 * rows)
    manifest = manifest_of(groups, 64)
    first = rows_of(manifest, 3)
    assert sorted(first) == sorted(rows_of(manifest, 3, epoch=1)) == list(range(sum(groups)))
    assert first != rows_of(manifest, 3, epoch=1)
    assert first == rows_of(manifest, 3, step=777)
    windows = Order(manifest, 3, 0)._windows
    assert len(windows) >= 2
    for window in windows:
        assert len({piece.group for piece in window}) >= drawn
        assert sum(piece.length for piece in window) <= 2 * rows
    # Sorted by a label, the first rows have labels from everywhere.
    assert drawn == 1 or len({row * 10 // manifest.rows for row in first[:200]}) >= 5


def losses_of(table: pa.Table, path: Path) -> list[float]:
    """The loss over all rows after each of some steps of a linear classifier, in one shuffled epoch."""
    pq.write_table(table, path, row_group_size=200)
    weights = torch.zeros(5, requires_grad=True)
    x = torch.stack([torch.tensor(table[f"x{n}"].to_numpy()) for n in range(4)] + [torch.ones(table.num_rows)], 1)
    y = torch.tensor(table["y"].to_numpy())
    losses = []
    shard = DatasetShard(manifest_of_path(str(path), "train"), TrainContext(), "train")
    for step, batch in enumerate(shard.iter_batches(64, shuffle=True)):
        rows = torch.stack([*(batch[f"x{n}"] for n in range(4)), torch.ones(len(batch["y"]))], 1)
        torch.nn.functional.binary_cross_entropy_with_logits(rows @ weights, batch["y"]).backward()
        with torch.no_grad():
            weights -= 0.5 * weights.grad
            weights.grad = None
            if step % 100 == 99:
                losses.append(float(torch.nn.functional.binary_cross_entropy_with_logits(x @ weights, y)))
    return losses


def test_a_table_that_is_sorted_by_its_label_trains_as_well_as_a_shuffled_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40_000, 4, generator=generator)
    y = (x.sum(1) + torch.randn(40_000, generator=generator) > 0).float()
    table = pa.table({**{f"x{n}": x[:, n].numpy() for n in range(4)}, "y": y.numpy()})
    monkeypatch.setattr(order, "WINDOW", 32 * 200 * order.LEAST)
    mixed = losses_of(table, tmp_path / "mixed.parquet")
    ordered = losses_of(table.sort_by("y"), tmp_path / "sorted.parquet")
    assert len(mixed) == 6
    assert ordered == pytest.approx(mixed, rel=0.2), "a label at a time: 2 and more"


# -- shares of ranks

totals = st.integers(0, 300)
worlds = st.integers(1, 9)
sizes = st.integers(1, 40)


def positions(spans: list[tuple[int, int]]) -> list[int]:
    return [position for low, high in spans for position in range(low, high)]


@given(totals, worlds)
def test_shares_differ_by_one_row_at_most_and_are_all_rows(total: int, world: int) -> None:
    parts = [split(total, world, rank) for rank in range(world)]
    counts = [high - low for low, high in parts]
    assert max(counts) - min(counts) <= 1
    assert positions(parts) == list(range(total))


@given(totals, worlds, sizes, st.booleans())
def test_every_rank_has_the_same_number_of_batches(total: int, world: int, size: int, drop_last: bool) -> None:
    plans = [Batches.of(total, world, rank, size, drop_last=drop_last) for rank in range(world)]
    assert len({plan.count for plan in plans}) == 1
    for plan in plans:
        counts = [plan.done(number + 1) - plan.done(number) for number in range(plan.count)]
        assert all(0 <= count <= size for count in counts)
        if drop_last:
            assert counts == [size] * plan.count
        else:
            assert sum(counts) == plan.own
            # None is empty, unless there are fewer rows than batches.
            assert plan.own < plan.count or 0 not in counts
            # Whole ones, but for the last two.
            assert counts[:-2] == [size] * (plan.count - 2 if plan.count > 2 else 0)
