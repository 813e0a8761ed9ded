"""Types of the columns that ranks write: widened only where every value stays what it is, and read by Spark."""

from __future__ import annotations

import datetime
import decimal
import itertools
from typing import Any

import pandas
import pyarrow as pa
import pytest
import torch

import rankzero.train as rt
from rankzero.data import columns, schemas
from rankzero.data.columns import Ragged

INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
DECIMALS = [
    pa.decimal128(5, 2),
    pa.decimal128(12, 2),
    pa.decimal128(23, 3),
    pa.decimal128(38, 0),
    pa.decimal128(38, 20),
]
NUMBERS = [*INTEGERS, pa.float32(), pa.float64(), *DECIMALS]


def _extremes(kind: pa.DataType) -> pa.Array:
    if pa.types.is_integer(kind):
        signed = pa.types.is_signed_integer(kind)
        top = (1 << (kind.bit_width - signed)) - 1
        return pa.array([top, top - 1, -top - 1 if signed else 0], kind)
    if pa.types.is_floating(kind):
        return pa.array([0.1, 3e38, 1.5e-45], kind)
    return pa.array([decimal.Decimal((sign, (9,) * kind.precision, -kind.scale)) for sign in (0, 1)], kind)


@pytest.mark.parametrize("one", NUMBERS, ids=str)
def test_a_wider_type_holds_every_value_of_both(one: pa.DataType) -> None:
    accepted = []
    for other in NUMBERS:
        try:
            found = schemas.unify([pa.schema([("n", kind)]) for kind in (one, other)], exact=True)
        except pa.ArrowException:
            continue
        accepted.append(other)
        for kind in (one, other):
            values = _extremes(kind)
            wide = schemas.fit(pa.table({"n": values}), found)["n"]
            assert [decimal.Decimal(value.as_py()) for value in wide] == [
                decimal.Decimal(value.as_py()) for value in values
            ], (one, other, found)
    assert one in accepted


@pytest.mark.parametrize(
    ("first", "second", "wide"),
    [
        (pa.int32(), pa.int64(), pa.int64()),
        (pa.uint32(), pa.int8(), pa.int64()),
        (pa.int32(), pa.float64(), pa.float64()),
        (pa.int32(), pa.float32(), pa.float64()),
        (pa.int8(), pa.float32(), pa.float32()),
        (pa.float32(), pa.float64(), pa.float64()),
        (pa.int64(), pa.decimal128(23, 3), pa.decimal128(23, 3)),
        (pa.list_(pa.int32()), pa.list_(pa.float64()), pa.list_(pa.float64())),
        (pa.null(), pa.struct([("x", pa.int8())]), pa.struct([("x", pa.int8())])),
        (pa.int64(), pa.float64(), None),
        (pa.int64(), pa.float32(), None),
        (pa.uint64(), pa.int64(), None),
        (pa.int64(), pa.decimal128(5, 2), None),
        (pa.decimal128(5, 2), pa.float64(), None),
        (pa.decimal128(38, 0), pa.decimal128(38, 20), None),
        (pa.struct([("x", pa.int64())]), pa.struct([("x", pa.float64())]), None),
        (pa.map_(pa.string(), pa.int64()), pa.map_(pa.string(), pa.float64()), None),
    ],
    ids=str,
)
def test_numbers_unite_where_none_is_rounded(first: pa.DataType, second: pa.DataType, wide: pa.DataType | None) -> None:
    for pair in itertools.permutations([pa.schema([("n", first)]), pa.schema([("n", second)])]):
        if wide is None:
            with pytest.raises(pa.ArrowTypeError, match="column 'n' has several types"):
                schemas.unify(pair, exact=True)
        else:
            assert schemas.unify(pair, exact=True).field("n").type == wide


def test_ids_beside_missing_ones_are_refused_with_what_to_do() -> None:
    whole, holed = pandas.DataFrame({"id": [2**53 + 1]}), pandas.DataFrame({"id": [1, None]})
    rt.write_rows(whole, "holed")
    with pytest.raises(TypeError, match=r"table 'holed': column 'id' has several types.*\"Int64\" keeps integers"):
        rt.write_rows(holed, "holed")
    table = rt.write_rows(holed.astype("Int64"), "holed").to_arrow().to_table()
    assert sorted(table["id"].to_pylist(), key=str) == [1, 2**53 + 1, None]


def test_columns_that_spark_does_not_tell_apart_are_refused() -> None:
    rt.write_rows({"a": [1]}, "case")
    with pytest.raises(TypeError, match="columns 'a' and 'A' differ only in case"):
        rt.write_rows({"A": [1]}, "case")
    with pytest.raises(TypeError, match="column 'a': fields 'x' and 'X' differ only in case"):
        rt.write_rows({"a": [[{"x": 1, "X": 2}]]}, "nested")


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
        "floats": [{"v": torch.tensor([2**24 + 1], dtype=torch.int32)}, {"v": torch.tensor([0.1])}],
        "decimals": [{"v": [2**53 + 1]}, {"v": pa.array([decimal.Decimal("0.125")], pa.decimal128(23, 3))}],
        "fields": [
            {"v": {"x": torch.tensor([2**24 + 1], dtype=torch.int32)}},
            {"v": pa.array([{"x": 0.5, "y": "z"}], pa.struct([("x", pa.float32()), ("y", pa.string())]))},
        ],
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
