"""Datasets through the front doors: TorchDistributor, Dagster."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rankzero.train as rt
from rankzero import InvalidJobError, Launcher, TorchDistributor, WorkerFailedError
from rankzero.compat.torch_distributor import _get_spark_partition_data_loader


@pytest.fixture
def numbers(tmp_path: Path) -> str:
    pairs = pa.array([[float(number), 1.0] for number in range(10)], pa.list_(pa.float64(), 2))
    pq.write_table(pa.table({"id": range(10), "x": pairs}), tmp_path / "t.parquet")
    return str(tmp_path / "t.parquet")


def partition_loader(num_samples: int, workers: int, is_prepared: bool = False) -> list[Any]:
    loader: Any = _get_spark_partition_data_loader(num_samples, 3, num_workers=workers)
    if is_prepared:
        loader = rt.prepare_data_loader(loader)
    return [[batch[0].tolist(), list(batch[1].shape)] for batch in loader]


@pytest.mark.parametrize(
    ("workers", "is_prepared"),
    [(0, False), *(pytest.param(*case, marks=pytest.mark.soak) for case in ((1, False), (0, True)))],
)
def test_pysparks_partition_loader_wraps_round(numbers: str, tmp_path: Path, workers: int, is_prepared: bool) -> None:
    launcher = Launcher(2, dataset=numbers, store=tmp_path / "runs")
    found = launcher.run(partition_loader, 7, workers, is_prepared)
    assert found == [[[0, 1, 2], [3, 2]], [[3, 4, 0], [3, 2]], [[1], [1, 2]]]


@pytest.mark.soak
def test_train_on_dataframe(session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKZERO_STORE", str(tmp_path))
    with pytest.raises(InvalidJobError, match=r"local_mode to False"):
        TorchDistributor(use_gpu=False)._train_on_dataframe(partition_loader, session.range(5), 3, 0)
    distributor = TorchDistributor(2, local_mode=False, use_gpu=False)
    # Fewer partitions than ranks, on which pyspark hangs.
    frame = session.range(0, 5, 1, 1).selectExpr("id", "array(id, id) AS x")
    found = distributor._train_on_dataframe(partition_loader, frame, 3, 0)
    assert found == [[[0, 1, 0], [3, 2]]]


def count_between(started: Path, end: Path) -> int:
    started.touch()
    while not end.exists():
        time.sleep(0.02)
    return rt.get_dataset_shard().num_rows


def test_two_threads_train_on_rows_of_their_own(session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKZERO_STORE", str(tmp_path / "runs"))
    distributor = TorchDistributor(1, local_mode=False, use_gpu=False)
    one, both, first_ended = (tmp_path / name for name in ("one", "both", "first-ended"))
    with ThreadPoolExecutor() as pool:
        first = pool.submit(distributor._train_on_dataframe, count_between, session.range(3), one, both)
        while not one.exists():
            time.sleep(0.02)
        second = pool.submit(distributor._train_on_dataframe, count_between, session.range(5), both, first_ended)
        assert first.result() == 3
        first_ended.touch()
        assert second.result() == 5
    with pytest.raises(WorkerFailedError, match="dataset"):
        distributor.run(count)


def count() -> int:
    return rt.get_dataset_shard().num_rows


@pytest.mark.soak
def test_dagster_takes_a_path_and_an_object(numbers: str, tmp_path: Path, session: Any) -> None:
    # A row of the matrix of versions has Spark alone.
    dg = pytest.importorskip("dagster")

    from dagster_rankzero import TorchDistributorResource

    resource = TorchDistributorResource(engine="local", num_processes=2, store=str(tmp_path / "runs"), dataset=numbers)
    context = dg.build_op_context()
    assert resource.run(context, count).value == 10
    with_frame = resource.options(dataset=session.range(7))
    assert with_frame.run(context, count).value == 7
    assert with_frame.options(num_processes=1).run(context, count).value == 7
    assert with_frame.options(dataset=numbers).run(context, count).value == 10
