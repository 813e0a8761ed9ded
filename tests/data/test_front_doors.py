"""Datasets through the front doors: Ray Train, Dagster."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rankzero.train as rt
from rankzero import Launcher
from rankzero.compat.ray_train import ScalingConfig, TorchTrainer, train


@pytest.fixture
def numbers(tmp_path: Path) -> str:
    pairs = pa.array([[float(number), 1.0] for number in range(10)], pa.list_(pa.float64(), 2))
    pq.write_table(pa.table({"id": range(10), "x": pairs}), tmp_path / "t.parquet")
    return str(tmp_path / "t.parquet")


def loop() -> Any:
    shard = train.get_dataset_shard("numbers")
    batches = list(shard.iter_torch_batches(batch_size=2))
    with pytest.raises(KeyError, match="gave: numbers, plain"):
        train.get_dataset_shard("other")
    plain = next(iter(train.get_dataset_shard("plain").iter_torch_batches(batch_size=2)))
    return [batch["id"].tolist() for batch in batches], plain.tolist()


def test_ray_train_iterates_over_a_table(numbers: str, tmp_path: Path) -> None:
    trainer = TorchTrainer(
        loop,
        scaling_config=ScalingConfig(num_workers=2),
        datasets={"numbers": numbers, "plain": list(range(4))},
        launcher=Launcher(store=tmp_path / "runs"),
    )
    assert trainer.fit().return_value == ([[0, 1], [2, 3], [4]], [0, 2])


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
