"""The order of an epoch: each row once, another in each epoch, the same for a seed, from everywhere."""

import itertools

import pytest
import torch

from rankzero.data import order
from rankzero.data.manifest import File, Manifest
from rankzero.data.order import Order


def manifest_of(groups: list[int], row_size: int) -> Manifest:
    return Manifest(schema="", files=(File("a", tuple(groups)),), size=sum(groups) * row_size, digest="")


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
    "groups", [[100] * 1000, [3000] * 40, [100, 9000] * 20, [100_000], [1] * 5000, [7] * 64 + [20_000]]
)
def test_a_larger_one_is_shuffled_by_groups_and_within_windows(
    groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "WINDOW", 64 * 4096)
    manifest = manifest_of(groups, 64)
    first, second = rows_of(manifest, 3), rows_of(manifest, 3, epoch=1)
    assert sorted(first) == sorted(second) == list(range(sum(groups)))
    assert first != second or len(groups) == sum(groups)
    assert first == rows_of(manifest, 3, step=777)


@pytest.mark.parametrize("groups", [100, 1000, 20_000])
def test_a_window_draws_from_many_groups_whatever_their_size(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "WINDOW", 64 * 8192)
    manifest = manifest_of([groups] * (400_000 // groups), 64)
    whole = Order(manifest, 3, 0)
    for window in whole._windows[:-1]:
        assert len({piece.group for piece in window}) >= min(order.GROUPS, len(manifest.files[0].rows))
        assert sum(piece.length for piece in window) <= 2 * 8192
    # Sorted by a label, the first rows have labels from everywhere.
    assert len({row * 10 // manifest.rows for row in rows_of(manifest, 3)[:200]}) >= 7
