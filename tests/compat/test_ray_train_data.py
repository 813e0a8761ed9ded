"""Data in Ray Train's names: a data set's batches are an iterable, and a loader is shared out as Ray does it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, TensorDataset, WeightedRandomSampler

import rankzero.train as rt
from rankzero import InvalidJobError, Launcher
from rankzero.compat.ray_train import DataConfig, RunConfig, ScalingConfig, TorchTrainer, dataset, train

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
    pq.write_table(pa.table({"x": list(range(ROWS))}), path)
    return path


def passes(config: dict[str, Any]) -> dict[str, list[list[int]]]:
    """Makes the batches once, and iterates over them for each epoch."""
    found = {}
    for name in ("torch", "table"):
        batches = train.get_dataset_shard(name).iter_torch_batches(batch_size=4, local_shuffle_buffer_size=ROWS)
        column = [lambda batch: batch[0], lambda batch: batch["x"]][name == "table"]
        found[name] = [[int(row) for batch in batches for row in column(batch)] for _ in range(3)]
    return found


def test_each_pass_over_the_batches_is_an_epoch(fit: Callable[..., Any], table: str) -> None:
    datasets = {"torch": TensorDataset(torch.arange(ROWS)), "table": table}
    for epochs in fit(passes, 1, datasets=datasets).values():
        assert [sorted(rows) for rows in epochs] == [list(range(ROWS))] * 3
        assert epochs[0] != epochs[1] != epochs[2], "each epoch has an order of its own"


def test_batches_are_also_an_iterator_of_one_epoch() -> None:
    dataset.install({"train": range(6)})
    batches = dataset.shard("train").iter_torch_batches(batch_size=3)
    assert [next(batches).tolist(), next(batches).tolist()] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(StopIteration):
        next(batches)
    first, second = iter(batches), iter(batches)
    assert [batch.tolist() for batch in second] == [batch.tolist() for batch in first] == [[0, 1, 2], [3, 4, 5]]


def resumed(path: str) -> list[list[int]]:
    """Loads the position behind the first batch; then makes two passes."""
    state = next(_states(rt.get_dataset_shard()))
    rt.get_dataset_shard().load_state_dict(state)
    batches = train.get_dataset_shard("train").iter_torch_batches(batch_size=4)
    return [[int(row) for batch in batches for row in batch["x"]] for _ in range(2)]


def _states(shard: Any) -> Iterator[dict[str, Any]]:
    for _ in shard.iter_batches(4):
        yield shard.state_dict()


def test_a_pass_resumes_inside_its_epoch(tmp_path: Path, table: str) -> None:
    rest, whole = Launcher(1, store=tmp_path / "runs", dataset=table).run(resumed, table)
    assert (rest, whole) == (list(range(4, ROWS)), list(range(ROWS)))


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


def test_a_sampler_that_orders_each_epoch_by_itself_resumes_inside_it() -> None:
    class Reversed(SequentialSampler):
        """Yields the indices backwards, those of each epoch rotated by its number."""

        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([(index - self.epoch) % 6 for index in reversed(range(6))])

    def prepared() -> Any:
        loader: Any = DataLoader(range(6), 2, sampler=Reversed(range(6)))  # type: ignore[arg-type]
        return train.torch.prepare_data_loader(loader, add_dist_sampler=False)

    before, after = prepared(), prepared()
    epochs = [[batch.tolist() for batch in before] for _ in range(2)]
    assert epochs == [[[5, 4], [3, 2], [1, 0]], [[4, 3], [2, 1], [0, 5]]]
    batches = iter(before)
    next(batches)
    after.load_state_dict(before.state_dict())
    assert [batch.tolist() for batch in after] == [[1, 0], [5, 4]]


def test_drop_last_drops_only_a_batch_that_is_not_full(fit: Callable[..., Any]) -> None:
    def loop() -> list[list[int]]:
        loader: Any = DataLoader(range(19), 10, drop_last=True)  # type: ignore[arg-type]
        return rt.all_gather_object([int(row) for batch in train.torch.prepare_data_loader(loader) for row in batch])

    # As torch's DistributedSampler pads 19 rows to 20.
    assert fit(loop) == [list(range(0, 19, 2)), [*range(1, 19, 2), 0]]


def in_rays_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """Reads the rows of a data set of dicts, and of a table, in every form."""
    found = {}
    for name in ("dicts", "table"):
        shard = train.get_dataset_shard(name)
        [batch] = shard.iter_torch_batches(batch_size=None, dtypes={"x": torch.float16})
        [same] = shard.iter_torch_batches(batch_size=ROWS, dtypes=torch.int8, device="cpu", pin_memory=True)
        [made] = shard.iter_torch_batches(batch_size=ROWS, collate_fn=lambda arrays: torch.from_numpy(arrays["x"]) + 1)
        [arrays] = shard.iter_batches(batch_size=ROWS)
        [frame] = shard.iter_batches(batch_size=ROWS, batch_format="pandas")
        [rows] = shard.iter_batches(batch_size=ROWS, batch_format="pyarrow")
        found[name] = [
            (batch["x"].dtype, same["x"].dtype, made.tolist()),
            (type(arrays["x"]).__name__, arrays["x"].tolist()),
            (frame["x"].tolist(), rows.column("x").to_pylist()),
            [int(row["x"]) for row in shard.iter_rows()],
        ]
    return found


def test_batches_in_rays_spelling(fit: Callable[..., Any], table: str) -> None:
    numbers = list(range(ROWS))
    expected = [
        (torch.float16, torch.int8, list(range(1, ROWS + 1))),
        ("ndarray", numbers),
        (numbers, numbers),
        numbers,
    ]
    datasets = {"dicts": [{"x": number} for number in numbers], "table": table}
    assert fit(in_rays_spelling, 1, datasets=datasets) == {"dicts": expected, "table": expected}


def test_rows_that_are_no_dicts_are_a_column_of_items() -> None:
    dataset.install({"train": range(4)})
    [batch] = dataset.shard("train").iter_batches()
    assert batch["item"].tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="batch_format is 'polars'; choose"):
        dataset.shard("train").iter_batches(batch_format="polars")
    with pytest.raises(ValueError, match="leave dtypes out"):
        dataset.shard("train").iter_torch_batches(dtypes=torch.int8, collate_fn=list)
    [rows] = dataset.shard("train").iter_torch_batches(collate_fn=list)
    assert rows == [0, 1, 2, 3], "a function of the rows themselves"


def test_rows_of_lists_are_tensors_as_in_ray() -> None:
    rows = [{"x": [number, number + 1], "name": [str(number)]} for number in range(3)]
    dataset.install({"train": rows})
    [batch] = dataset.shard("train").iter_torch_batches(dtypes={"x": torch.float32})
    assert torch.equal(batch["x"], torch.tensor([[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]]))
    assert batch["name"] == [("0", "1", "2")], "texts are none"
    [frame] = dataset.shard("train").iter_batches(batch_format="pandas")
    assert [list(row) for row in frame["x"]] == [row["x"] for row in rows]


def shares(config: dict[str, Any]) -> Any:
    mine = {
        name: [int(row) for batch in train.get_dataset_shard(name).iter_torch_batches() for row in batch]
        for name in ("train", "test")
    }
    return rt.all_gather_object(mine)


def test_a_data_set_that_is_not_split_is_whole_on_each_worker(fit: Callable[..., Any], table: str) -> None:
    config = DataConfig(datasets_to_split=["train"])
    found = fit(shares, datasets={"train": range(4), "test": range(3)}, dataset_config=config)
    assert found == [{"train": [0, 2], "test": [0, 1, 2]}, {"train": [1, 3], "test": [0, 1, 2]}]
    with pytest.raises(InvalidJobError, match="leaves out test, a table, of which every worker gets a share"):
        TorchTrainer(shares, datasets={"test": table}, dataset_config=config)
    with pytest.raises(InvalidJobError, match="datasets_to_split is 'train'"):
        DataConfig(datasets_to_split="train")
    with pytest.raises(InvalidJobError, match="execution_options is not supported: Spark"):
        DataConfig(execution_options={})
    with pytest.raises(InvalidJobError, match="configure is not supported: give datasets_to_split"):
        type("Own", (DataConfig,), {"configure": print})()
