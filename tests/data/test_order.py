"""The order of an epoch: each row once, another in each epoch, the same for a seed."""

import pytest
import torch

from rankzero.data import shares
from rankzero.data.shares import Order


def rows_of(rows: int, seed: int | None, epoch: int = 0, row_size: int = 8, step: int = 1000) -> list[int]:
    made = Order(rows, row_size, seed, epoch)
    return torch.cat([made.rows(low, min(rows, low + step)) for low in range(0, rows, step)]).tolist()


def test_without_a_seed_rows_keep_their_order() -> None:
    assert rows_of(2500, None) == list(range(2500))


def test_a_dataset_that_fits_is_shuffled_as_a_whole() -> None:
    first, second = rows_of(5000, 1), rows_of(5000, 1, epoch=1)
    assert sorted(first) == sorted(second) == list(range(5000))
    assert first != second
    assert first == rows_of(5000, 1, step=7)
    assert first != rows_of(5000, 2)
    # From everywhere, from the first rows on.
    assert max(first[:100]) > 4000
    assert min(first[:100]) < 1000


@pytest.mark.parametrize("rows", [100_000, 100_001, 65_536, 99_999])
def test_a_larger_one_is_shuffled_by_blocks_and_within_windows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "WINDOW_ROWS", 8192)
    monkeypatch.setattr(shares, "WHOLE_ROWS", 8192)
    monkeypatch.setattr(shares, "BLOCKS", 64)
    first, second = rows_of(rows, 3), rows_of(rows, 3, epoch=1)
    assert sorted(first) == sorted(second) == list(range(rows))
    assert first != second
    window = first[:8192]
    # Blocks of 128 neighbours, from everywhere, mixed.
    assert len({row // 128 for row in window}) <= 2 * 64 + 2
    assert max(window) > rows * 0.8
    assert min(window) < rows * 0.2
    assert window != sorted(window)
    assert len({row // 128 for row in first[:20]}) > 10


@pytest.mark.parametrize(("mebibytes", "held"), [(256, 256), (257, 128), (900, 128)])
def test_a_reader_holds_256_mebibytes_at_most(mebibytes: int, held: int) -> None:
    assert Order(mebibytes << 10, 1 << 10, 1, 0).window == held << 10
