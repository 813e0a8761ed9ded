"""Data in Ray Train's names: a table's batches are an iterable, and a loader is shared out as Ray does it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

import rankzero.train as rt
from rankzero import InvalidJobError
from rankzero.compat.ray_train import RunConfig, ScalingConfig, TorchTrainer, train

ROWS = 16


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Any]:
    """Returns a function that trains on two workers, and returns the value of rank 0."""

    def fit(loop: Callable[..., Any], workers: int = 2, **options: Any) -> Any:
        run_config = RunConfig(storage_path=tmp_path / "runs")
        scaling = ScalingConfig(num_workers=workers)
        return TorchTrainer(loop, scaling_config=scaling, run_config=run_config, **options).fit().return_value

    return fit


@pytest.fixture
def table(tmp_path: Path) -> str:
    path = str(tmp_path / "rows.parquet")
    pq.write_table(pa.table({"x": list(range(ROWS)), "name": [str(n) for n in range(ROWS)]}), path)
    return path


def in_rays_spelling() -> Any:
    shard = train.get_dataset_shard()
    [all_rows] = shard.iter_torch_batches(batch_size=None, dtypes=torch.float16)
    [typed] = shard.iter_torch_batches(batch_size=ROWS, dtypes={"x": torch.int8}, device="cpu", pin_memory=True)
    [made] = shard.iter_torch_batches(batch_size=ROWS, collate_fn=lambda arrays: (type(arrays["x"]), arrays["x"] + 1))
    shuffled = shard.iter_torch_batches(batch_size=5, local_shuffle_buffer_size=ROWS, drop_last=True)
    epochs = [[batch["x"].tolist() for batch in shuffled] for _ in range(2)]
    with pytest.raises(InvalidJobError, match="no dataset 'test'.*has: train"):
        train.get_dataset_shard("test")
    return all_rows, typed["x"].dtype, made[0], made[1].tolist(), epochs


def test_batches_in_rays_spelling(fit: Callable[..., Any], table: str) -> None:
    all_rows, typed, kind, made, epochs = fit(in_rays_spelling, 1, datasets={"train": table})
    assert (all_rows["x"].dtype, all_rows["name"][:2]) == (torch.float16, ["0", "1"]), "texts have no other type"
    assert (typed, kind, made) == (torch.int8, numpy.ndarray, list(range(1, ROWS + 1)))
    assert [[len(batch) for batch in epoch] for epoch in epochs] == [[5] * 3] * 2
    assert epochs[0] != epochs[1], "each iteration is an epoch, with an order of its own"


def test_workers_share_the_rows_of_a_table(fit: Callable[..., Any], table: str) -> None:
    def loop() -> Any:
        batches = train.get_dataset_shard("train").iter_torch_batches(batch_size=3)
        return rt.all_gather_object([row for batch in batches for row in batch["x"].tolist()])

    first, second = fit(loop, datasets={"train": table})
    assert sorted(first + second) == list(range(ROWS))


class Shards(IterableDataset[int]):
    """Yields the rows of this worker's shards, as Ray's guides expect of a data set without indices."""

    def __iter__(self) -> Iterator[int]:
        context = train.get_context()
        return iter(range(context.get_world_rank(), ROWS, context.get_world_size()))


def test_an_iterable_data_set_that_shares_itself_out_is_left_alone(fit: Callable[..., Any]) -> None:
    def loop() -> list[list[int]]:
        loader = train.torch.prepare_data_loader(DataLoader(Shards(), batch_size=3))
        return rt.all_gather_object([int(row) for batch in loader for row in batch])

    assert fit(loop) == [list(range(0, ROWS, 2)), list(range(1, ROWS, 2))]


def test_without_a_distributed_sampler_each_worker_draws_by_itself(fit: Callable[..., Any]) -> None:
    def loop() -> list[Any]:
        found = []
        for options in ({"sampler": WeightedRandomSampler(torch.ones(1000), 8)}, {"shuffle": True}):
            plain: Any = DataLoader(range(1000), 8, **options)  # type: ignore[arg-type]
            prepared = train.torch.prepare_data_loader(plain, add_dist_sampler=False)
            drawn = []
            for loader in (plain, prepared):
                torch.manual_seed(train.get_context().get_world_rank())
                drawn.append([batch.tolist() for _ in range(2) for batch in loader])
            found.append(drawn)
        return rt.all_gather_object(found)

    for first, second in zip(*fit(loop), strict=True):
        assert [plain == prepared for plain, prepared in (first, second)] == [True, True]
        assert first != second


def test_drop_last_drops_only_a_batch_that_is_not_full(fit: Callable[..., Any]) -> None:
    def loop() -> list[list[int]]:
        loader: Any = DataLoader(range(19), 10, drop_last=True)  # type: ignore[arg-type]
        return rt.all_gather_object([int(row) for batch in train.torch.prepare_data_loader(loader) for row in batch])

    # As torch's DistributedSampler pads 19 rows to 20.
    assert fit(loop) == [list(range(0, 19, 2)), [*range(1, 19, 2), 0]]
