"""Each Arrow type and its tensor; what has none is named."""

import datetime
import decimal
from typing import Any

import pyarrow as pa
import pytest
import torch

from rankzero import InvalidJobError
from rankzero.data import kinds
from rankzero.data.columns import Ragged, joined, part, rows_of, tensors

UTC = datetime.UTC
VECTOR = pa.struct(
    [
        pa.field("type", pa.int8()),
        pa.field("size", pa.int32()),
        pa.field("indices", pa.list_(pa.int32())),
        pa.field("values", pa.list_(pa.float64())),
    ]
)


def column_of(array: Any, length: int | None = None) -> Any:
    batch = pa.RecordBatch.from_arrays([array], ["c"])
    kinds.check(batch.schema, "it")
    return tensors(batch, {} if length is None else {"c": length})["c"]


@pytest.mark.parametrize(
    ("array", "dtype", "values"),
    [
        (pa.array([1, 2], pa.int8()), torch.int8, [1, 2]),
        (pa.array([1, 2], pa.int64()), torch.int64, [1, 2]),
        (pa.array([1, 2], pa.uint8()), torch.uint8, [1, 2]),
        (pa.array([1, 60_000], pa.uint16()), torch.int32, [1, 60_000]),
        (pa.array([1, 4_000_000_000], pa.uint32()), torch.int64, [1, 4_000_000_000]),
        (pa.array([1.5, None], pa.float32()).fill_null(2.5), torch.float32, [1.5, 2.5]),
        (pa.array([True, False, True]), torch.bool, [True, False, True]),
        (pa.array([decimal.Decimal("1.25")]), torch.float64, [1.25]),
        (pa.array([decimal.Decimal("0.35"), decimal.Decimal("-0.57")]), torch.float64, [0.35, -0.57]),
        (pa.array([datetime.date(1970, 1, 3)]), torch.int32, [2]),
        (pa.array([datetime.datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)]), torch.int64, [1_000_000]),
        (pa.array([5], pa.timestamp("ms")), torch.int64, [5000]),
        (pa.array([datetime.timedelta(seconds=2)]), torch.int64, [2_000_000]),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)), torch.int32, [[1, 2], [3, 4]]),
        (pa.array([], pa.float32()), torch.float32, []),
    ],
)
def test_numbers_become_tensors(array: Any, dtype: torch.dtype, values: list[Any]) -> None:
    found = column_of(array)
    assert found.dtype == dtype
    assert found.tolist() == values


def test_memory_is_shared_where_nothing_is_converted() -> None:
    array = pa.array(range(100), pa.int64()).slice(10, 20)
    assert column_of(array).data_ptr() == array.buffers()[1].address + 80
    lists = pa.array([[1.0, 2.0]] * 10).slice(3, 4)
    found = column_of(lists, 2)
    assert found.shape == (4, 2)
    assert found.data_ptr() == lists.values.buffers()[1].address + 3 * 16


def test_nulls_of_floats_are_nan_and_of_texts_none() -> None:
    assert str(column_of(pa.array([1.0, None])).tolist()) == "[1.0, nan]"
    assert column_of(pa.array(["a", None])) == ["a", None]
    assert column_of(pa.array([b"x"])) == [b"x"]


@pytest.mark.parametrize("array", [pa.array([1, None]), pa.array([True, None]), pa.array([[1.0], None])])
def test_other_nulls_are_named(array: Any) -> None:
    with pytest.raises(InvalidJobError, match="column 'c' .* has nulls"):
        column_of(array)


def test_arrays_of_several_lengths_are_values_and_offsets() -> None:
    found = column_of(pa.array([[9], [1, 2], [], [3]]).slice(1, 3))
    assert isinstance(found, Ragged)
    assert found.values.tolist() == [1, 2, 3]
    assert found.offsets.tolist() == [0, 2, 2, 3]
    cut = part(found, 1, 3)
    assert isinstance(cut, Ragged)
    assert (cut.values.tolist(), cut.offsets.tolist()) == ([3], [0, 0, 1])
    both = joined([found, cut], "x")
    assert isinstance(both, Ragged)
    assert (both.values.tolist(), both.offsets.tolist()) == ([1, 2, 3, 3], [0, 2, 2, 3, 3, 4])
    assert rows_of({"c": both}) == 5


def test_a_struct_is_a_dict_of_its_fields() -> None:
    found = column_of(pa.array([{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]).slice(1, 1))
    assert found["a"].tolist() == [2]
    assert found["b"] == ["y"]
    assert rows_of({"c": found}) == 1


def dense(*values: float) -> dict[str, Any]:
    return {"type": 1, "size": None, "indices": None, "values": values}


def sparse(size: int, **values: float) -> dict[str, Any]:
    return {"type": 0, "size": size, "indices": [int(key[1:]) for key in values], "values": list(values.values())}


@pytest.mark.parametrize("length", [None, 3])
def test_vectors_of_spark_are_rows_of_a_matrix(length: int | None) -> None:
    rows = [dense(9, 9, 9), dense(1, 2, 3), sparse(3, i1=5.0), sparse(3), dense(4, 5, 6)]
    found = column_of(pa.array(rows, VECTOR).slice(1), length)
    assert found.tolist() == [[1, 2, 3], [0, 5, 0], [0, 0, 0], [4, 5, 6]]
    assert column_of(pa.array([dense(1, 2), dense(3, 4)], VECTOR), 2).tolist() == [[1, 2], [3, 4]]


def test_vectors_of_several_lengths_are_named() -> None:
    with pytest.raises(InvalidJobError, match="column 'c' has vectors of 2 to 3 numbers"):
        column_of(pa.array([dense(1, 2), sparse(3)], VECTOR))


@pytest.mark.parametrize(
    "kind",
    [
        pa.map_(pa.string(), pa.int64()),
        pa.list_(pa.string()),
        pa.list_(pa.list_(pa.int64())),
        pa.month_day_nano_interval(),
        pa.null(),
        pa.struct([pa.field("inner", pa.map_(pa.string(), pa.int64()))]),
    ],
)
def test_what_there_is_no_tensor_of_is_named_by_the_schema(kind: Any) -> None:
    with pytest.raises(InvalidJobError, match="column 'c' of it is "):
        kinds.check(pa.schema([pa.field("c", kind)]), "it")
