"""A Spark DataFrame between assets: a dataset of the training that takes it."""

from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rankzero.train as rt
from dagster_rankzero import RankZeroIOManager, TorchDistributorResource, torch_asset


def test_a_frame_that_is_an_input_is_a_dataset(
    torch_distributor: TorchDistributorResource, tmp_path: Path, session: Any
) -> None:
    pq.write_table(pa.table({"id": range(10)}), tmp_path / "t.parquet")

    @dg.asset
    def scans() -> Any:
        return session.range(7)

    @dg.asset
    def factor() -> int:
        return 3

    @torch_asset(options={"dataset": str(tmp_path / "t.parquet")})
    def model(scans: Any, factor: int) -> list[int]:
        return [rt.get_dataset_shard(scans).num_rows * factor, rt.get_dataset_shard("train").num_rows]

    resources = {"torch_distributor": torch_distributor, "io_manager": dg.mem_io_manager}
    result = dg.materialize([scans, factor, model], resources=resources)
    assert result.output_for_node("model") == [21, 10]
    resources["io_manager"] = RankZeroIOManager(base_path=str(tmp_path / "assets"))
    with pytest.raises(dg.Failure, match="stores no DataFrame of Spark: return the path of a table"):
        dg.materialize([scans], resources=resources)
