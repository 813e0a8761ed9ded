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


def test_a_frame_that_is_an_input_of_an_asset_is_a_dataset(numbers: str, tmp_path: Path, session: Any) -> None:
    dg = pytest.importorskip("dagster")

    from dagster_rankzero import RankZeroIOManager, TorchDistributorResource, torch_asset

    @dg.asset
    def scans() -> Any:
        return session.range(7)

    @torch_asset
    def model(scans: Any, factor: int = 2) -> list[int]:
        return [rt.get_dataset_shard(scans).num_rows * factor, rt.get_dataset_shard("train").num_rows]

    resource = TorchDistributorResource(engine="local", store=str(tmp_path / "runs"), dataset=numbers)
    resources = {"torch_distributor": resource, "io_manager": dg.mem_io_manager}

    @dg.asset
    def factor() -> int:
        return 3

    result = dg.materialize([scans, factor, model], resources=resources)
    assert result.output_for_node("model") == [21, 10]
    resources["io_manager"] = RankZeroIOManager(base_path=str(tmp_path / "assets"))
    with pytest.raises(dg.Failure, match="stores no DataFrame of Spark: return the path of a table"):
        dg.materialize([scans], resources=resources)
