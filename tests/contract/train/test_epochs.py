"""A restart continues with the epoch and batch with which the training would have continued without it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.contract.train.test_data_loader import Stateful
from torch.utils.data import DataLoader

import rankzero.train as rt
from rankzero.submit.datasets import manifest_of_path

ROWS = 12


class Source:
    """A loader, or a share of a dataset, with one way to iterate over both."""

    def __init__(self, kind: str, path: Path) -> None:
        if kind == "shard":
            manifest = manifest_of_path(str(path / "rows.parquet"), "train")
            self.data: Any = rt.DatasetShard(manifest, rt.TrainContext(), "train")
        else:
            loader = DataLoader if kind == "loader" else Stateful
            self.data = rt.prepare_data_loader(loader(range(ROWS), 1, shuffle=True))  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        shard = isinstance(self.data, rt.DatasetShard)
        batches = self.data.iter_batches(1, shuffle=True, prefetch=0) if shard else iter(self.data)
        return (int(batch["id"] if isinstance(batch, dict) else batch) for batch in batches)


@pytest.fixture(params=["loader", "stateful", "shard"])
def source(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Source]:
    monkeypatch.setattr("rankzero.train.context._session", None)
    pq.write_table(pa.table({"id": list(range(ROWS))}), tmp_path / "rows.parquet")

    def made(state: Any = None) -> Source:
        source = Source(request.param, tmp_path)
        if state:
            source.data.load_state_dict(state)
        return source

    return made


def cut_short(source: Source, limit: int = 9) -> list[int]:
    seen: list[int] = []
    for number, row in enumerate(source):
        if number == limit:
            break
        seen.append(row)
    return seen


def test_an_epoch_that_a_loop_has_left_continues_after_a_restart(source: Callable[..., Source]) -> None:
    """A training that is to stop leaves its loop, and reports its last checkpoint behind it."""
    whole = source()
    expected = [list(whole), list(whole)]
    first = source()
    seen = cut_short(first)
    assert first.data.epoch == 0
    # The loop has taken one more batch, which it has not used.
    again = source(first.data.state_dict())
    assert [list(again), list(again)] == [expected[0][len(seen) + 1 :], expected[1]]


def test_an_epoch_with_a_limit_of_batches_is_ended_by_set_epoch(source: Callable[..., Source]) -> None:
    whole = source()
    expected = [cut_short(whole) for _ in range(3)]
    first = source()
    assert cut_short(first) == expected[0]
    first.data.set_epoch(1)
    again = source(first.data.state_dict())
    assert [cut_short(again), cut_short(again)] == expected[1:]


def test_a_loaded_position_is_that_of_its_epoch_only(source: Callable[..., Source]) -> None:
    whole, first = source(), source()
    orders = [list(whole) for _ in range(4)]
    list(first)
    cut_short(first, 3)
    for epoch, begin in ((1, 4), (0, 0), (3, 0)):
        again = source(first.data.state_dict())
        again.data.set_epoch(epoch)
        assert list(again) == orders[epoch][begin:]
        again.data.set_epoch(1)
        assert list(again) == orders[1], "an epoch that is set once more begins at its first batch"


def raises(source: Source) -> None:
    for number, _ in enumerate(source, 1):
        if number == 5:
            raise KeyError


def test_a_checkpoint_in_a_handler_is_that_of_the_batch_that_raised(source: Callable[..., Source]) -> None:
    whole, first, states = source(), source(), []
    orders = [list(whole), list(whole)]
    try:
        try:
            raises(first)
        finally:
            states.append(first.data.state_dict())
    except KeyError:
        states.append(first.data.state_dict())
        for state in states:
            assert list(source(state)) == orders[0][5:]
    assert list(source(first.data.state_dict())) == orders[0][5:]
    assert list(first) == orders[1]


def test_a_state_is_kept_until_the_first_batch(source: Callable[..., Source]) -> None:
    first = source()
    list(first)
    batches = iter(first)
    seen = [next(batches) for _ in range(5)]
    state = first.data.state_dict()
    kept = source(state).data.state_dict()
    assert kept == state
    assert sorted([*seen, *source(kept)]) == list(range(ROWS))


def test_a_loop_within_a_loop_moves_no_position(source: Callable[..., Source]) -> None:
    whole = source()
    expected = [list(whole), list(whole)]
    first, seen = source(), []
    for row in first:
        seen.append(row)
        if len(seen) in (3, ROWS):
            state = first.data.state_dict()
            assert sorted(first) == list(range(ROWS))
            if len(seen) == 3:
                again = source(state)
                assert [list(again), list(again)] == [expected[0][3:], expected[1]]
    assert [seen, list(first)] == expected
