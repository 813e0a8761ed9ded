"""Datasets through the resource of Dagster."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rankzero.train as rt


@pytest.fixture
def numbers(tmp_path: Path) -> str:
    pairs = pa.array([[float(number), 1.0] for number in range(10)], pa.list_(pa.float64(), 2))
    pq.write_table(pa.table({"id": range(10), "x": pairs}), tmp_path / "t.parquet")
    return str(tmp_path / "t.parquet")


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
