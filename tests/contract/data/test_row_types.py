"""Types of the columns that ranks write: one for each column, and read by Spark."""

from __future__ import annotations

import datetime
import itertools
from typing import Any

import pandas
import pyarrow as pa
import pytest
import torch

import rankzero.train as rt
from rankzero.data import columns, schemas
from rankzero.data.columns import Ragged


@pytest.mark.parametrize(
    ("first", "second", "fits"),
    [
        (pa.null(), pa.struct([("x", pa.int8())]), True),
        (pa.int32(), pa.int64(), False),
        (pa.int64(), pa.float64(), False),
        (pa.float32(), pa.float64(), False),
        (pa.decimal128(5, 2), pa.decimal128(6, 2), False),
        (pa.list_(pa.int32()), pa.list_(pa.int64()), False),
    ],
    ids=str,
)
def test_a_column_has_one_type(first: pa.DataType, second: pa.DataType, fits: bool) -> None:
    for pair in itertools.permutations([pa.schema([("n", first)]), pa.schema([("n", second)])]):
        if fits:
            assert schemas.unify_written(pair).field("n").type == second
        else:
            with pytest.raises(TypeError, match="n has incompatible types: .* write it with one type"):
                schemas.unify_written(pair)


def test_ids_beside_missing_ones_are_refused_with_what_to_do() -> None:
    whole, holed = pandas.DataFrame({"id": [2**53 + 1]}), pandas.DataFrame({"id": [1, None]})
    rt.write_rows(whole, "holed")
    with pytest.raises(TypeError, match=r"table 'holed': .*id has incompatible types.*\"Int64\" keeps integers"):
        rt.write_rows(holed, "holed")
    table = rt.write_rows(holed.astype("Int64"), "holed").to_arrow().to_table()
    assert sorted(table["id"].to_pylist(), key=str) == [1, 2**53 + 1, None]


def test_columns_that_spark_does_not_tell_apart_are_refused() -> None:
    rt.write_rows({"a": [1]}, "case")
    with pytest.raises(TypeError, match="columns 'a' and 'A' differ only in case"):
        rt.write_rows({"A": [1]}, "case")


def test_spark_reads_every_row_of_every_type(session: Any) -> None:
    moment = datetime.datetime(2024, 1, 2, 3, 4, 5, 678901)
    times = {
        "structs": pa.struct([("t", pa.timestamp("ns")), ("h", pa.list_(pa.float16()))]),
        "maps": pa.map_(pa.string(), pa.timestamp("ns")),
        "lists": pa.large_list(pa.struct([("t", pa.timestamp("s"))])),
    }
    values = [{"t": moment, "h": [0.5]}], [[("k", moment)]], [[{"t": moment.replace(microsecond=0)}]]
    batches: dict[str, list[dict[str, Any]]] = {
        **{name: [{"v": pa.array(value, times[name])}] for name, value in zip(times, values, strict=True)},
        "days": [{"v": pa.array([0], pa.date64())}, {"v": [datetime.date(2024, 1, 2)]}],
    }
    for name, each in batches.items():
        table = rt.write_rows(each, name)
        plain = table.to_arrow().to_table()["v"].to_pylist()
        found = [row.asDict(recursive=True)["v"] for row in table.to_spark(session).collect()]
        expected = [dict(value) if name == "maps" else value for value in plain]
        assert sorted(map(repr, found)) == sorted(map(repr, expected)), name


def test_spark_reads_a_table_of_this_host_whatever_its_default_file_system_is(session: Any) -> None:
    table = rt.write_rows({"a": [1, 2]}, "local")
    configuration = session.sparkContext._jsc.hadoopConfiguration()
    configuration.set("fs.defaultFS", "hdfs://elsewhere.invalid:1")
    try:
        assert sorted(row.a for row in table.to_spark(session).collect()) == [1, 2]
    finally:
        configuration.unset("fs.defaultFS")


def test_arrays_with_more_values_than_arrow_counts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "MAX_VALUES", 2)
    batch = {"a": Ragged(torch.arange(3), torch.tensor([0, 1, 3]))}
    with pytest.raises(TypeError, match="3 values in one batch.*write smaller batches"):
        rt.write_rows(batch, "many")
