"""Converts Arrow columns to tensors, by the mapping of `rankzero.data.kinds`, and a user's columns to Arrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.dlpack import from_dlpack

from rankzero.data.kinds import allows_null, is_list, is_text, is_vector
from rankzero.errors import InvalidJobError

_DENSE = 1

MAX_VALUES = (1 << 31) - 1
"""Most values of a column of arrays in one batch, since Arrow counts them with 32 bits."""


class Ragged(NamedTuple):
    """A column of ``n`` arrays with different lengths, concatenated.

    Attributes:
        values: Values of all rows.
        offsets: ``n + 1`` numbers: row ``i`` is ``values[offsets[i]:offsets[i + 1]]``.
    """

    values: torch.Tensor
    offsets: torch.Tensor


Column = torch.Tensor | Ragged | list[Any] | dict[str, Any]
Columns = dict[str, Column]


def tensors(batch: Any, lengths: Mapping[str, int]) -> Columns:
    """Returns the columns of a `pyarrow.RecordBatch` as tensors.

    Args:
        batch: The rows. Tensors share its memory unless a type must be converted.
        lengths: By name, the length of the arrays or vectors of a column that have the same length in every row.

    Raises:
        InvalidJobError: a column has a null, or arrays of different lengths, which its tensor cannot hold.
    """
    return {
        name: _column(column, name, lengths.get(name))
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }


def _column(array: Any, name: str, size: int | None) -> Column:
    from pyarrow import types

    kind = array.type
    if is_text(kind):
        found: list[Any] = array.to_pylist()
        return found
    if array.null_count and not allows_null(kind):
        raise InvalidJobError(
            f"column {name!r} ({kind}) has nulls, and there is no such {kind} in a tensor: fill or filter them, for "
            "example with DataFrame.fillna or dropna"
        )
    if is_vector(kind):
        return _vectors(array, name, size)
    if types.is_struct(kind):
        fields = zip(kind, array.flatten(), strict=True)
        return {field.name: _column(child, f"{name}.{field.name}", None) for field, child in fields}
    if is_list(kind):
        return _lists(array, name, size)
    return _numbers(array, name)


def _numbers(array: Any, name: str) -> torch.Tensor:
    import pyarrow as pa

    kind = array.type
    types = pa.types
    if types.is_boolean(kind):
        return from_dlpack(array.cast(pa.uint8())).view(torch.bool)
    if types.is_decimal(kind):
        # Arrow's own cast is often not the nearest float.
        array = array.cast(pa.string()).cast(pa.float64())
    elif types.is_date(kind):
        array = array.cast(pa.date32()).view(pa.int32())
    elif types.is_timestamp(kind):
        array = _in_microseconds(array, pa.timestamp("us", kind.tz), name)
    elif types.is_time(kind):
        array = _in_microseconds(array, pa.time64("us"), name)
    elif types.is_duration(kind):
        array = _in_microseconds(array, pa.duration("us"), name)
    elif kind in (larger := {pa.uint16(): pa.int32(), pa.uint32(): pa.int64(), pa.uint64(): pa.int64()}):
        try:
            array = array.cast(larger[kind])
        except pa.ArrowInvalid as error:
            raise InvalidJobError(f"column {name!r} ({kind}) has a number that int64 cannot hold") from error
    if array.null_count:
        array = array.fill_null(float("nan"))
    # An empty array may have no memory at all.
    if not len(array):
        return torch.empty(0, dtype=getattr(torch, _TORCH_NAMES.get(str(array.type), str(array.type))), device="cpu")
    return from_dlpack(array)


def _in_microseconds(array: Any, kind: Any, name: str) -> Any:
    """Returns times in microseconds as int64; nanoseconds are truncated."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        options = pc.CastOptions(target_type=kind, allow_time_truncate=True)
        return pc.cast(array, options=options).view(pa.int64())
    except pa.ArrowInvalid as error:
        message = f"column {name!r} ({array.type}) has a value that int64 cannot hold in microseconds: {error}"
        raise InvalidJobError(message) from error


_TORCH_NAMES = {"float": "float32", "double": "float64", "halffloat": "float16"}


def _lists(array: Any, name: str, size: int | None) -> Column:
    from pyarrow import types

    # `flatten` leaves out the values outside of a slice.
    values = _column(array.flatten(), name, None)
    assert isinstance(values, torch.Tensor)
    if types.is_fixed_size_list(array.type):
        return values.reshape(len(array), array.type.list_size, *values.shape[1:])
    if size is not None and len(values) == size * len(array):
        return values.reshape(len(array), size, *values.shape[1:])
    offsets = _numbers(array.offsets, name)
    return Ragged(values, (offsets - offsets[0]).long())


def _vectors(array: Any, name: str, size: int | None) -> torch.Tensor:
    kinds, sizes, indices, values = array.flatten()
    dense = _numbers(kinds, name) == _DENSE
    counts = _numbers(values.value_lengths(), name).long()
    if size is None:
        every = torch.where(dense, counts, _numbers(sizes.fill_null(0), name).long())
        size = int(every[0]) if len(every) else 0
        if (every != size).any():
            raise _several_lengths(name, int(every.min()), int(every.max()))
    flat = _numbers(values.flatten(), name)
    if bool(dense.all()) and len(flat) == size * len(array):
        return flat.reshape(len(array), size)
    found = torch.zeros(len(array), size, dtype=flat.dtype, device="cpu")
    rows = torch.arange(len(array), device="cpu").repeat_interleave(counts)
    places = torch.arange(len(flat), device="cpu") - (counts.cumsum(0) - counts)[rows]
    places[~dense[rows]] = _numbers(indices.flatten(), name).long()
    found[rows, places] = flat
    return found


def _several_lengths(name: str, least: int, most: int) -> InvalidJobError:
    return InvalidJobError(
        f"column {name!r} has vectors of {least} to {most} numbers: a tensor needs vectors of one length"
    )


def part(column: Column, low: int, high: int) -> Column:
    """Returns the rows ``low`` to ``high - 1`` of a column, without copying them."""
    if isinstance(column, Ragged):
        offsets = column.offsets[low : high + 1]
        return Ragged(column.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])
    if isinstance(column, dict):
        return {name: part(inner, low, high) for name, inner in column.items()}
    return column[low:high]


def joined(columns: Sequence[Column], name: str) -> Column:
    """Returns the concatenated pieces of a column; a single piece is not copied.

    Args:
        columns: The pieces.
        name: Name of the column, for errors.

    Raises:
        InvalidJobError: the pieces have vectors of different lengths.
    """
    first = columns[0]
    if len(columns) == 1:
        return first
    if isinstance(first, torch.Tensor):
        sizes = {int(column.shape[1]) for column in columns if column.ndim == 2}  # type: ignore[union-attr]
        if len(sizes) > 1:
            raise _several_lengths(name, min(sizes), max(sizes))
        return torch.cat(columns)  # type: ignore[arg-type]
    if isinstance(first, Ragged):
        return _joined_ragged(columns)  # type: ignore[arg-type]
    if isinstance(first, dict):
        return {field: joined([column[field] for column in columns], f"{name}.{field}") for field in first}  # type: ignore[index,call-overload]
    return [item for column in columns for item in column]


def _joined_ragged(columns: Sequence[Ragged]) -> Ragged:
    offsets, end = [columns[0].offsets[:1]], 0
    for column in columns:
        offsets.append(column.offsets[1:] + end)
        end += int(column.offsets[-1])
    return Ragged(torch.cat([column.values for column in columns]), torch.cat(offsets))


def rows_of(columns: Columns) -> int:
    """Returns the number of rows of a batch. Raises ValueError if it has no column."""
    column: Any = next(iter(columns.values()), None)
    if column is None:
        raise ValueError("a batch without columns has no rows")
    if isinstance(column, Ragged):
        return len(column.offsets) - 1
    return rows_of(column) if isinstance(column, dict) else len(column)


def as_table(batch: Any) -> Any:
    """Returns a batch of columns as an Arrow table. Raises TypeError if it is none."""
    import pyarrow as pa

    if isinstance(batch, pa.Table):
        return batch
    if isinstance(batch, pa.RecordBatch):
        return pa.Table.from_batches([batch])
    if hasattr(batch, "iloc"):
        return pa.Table.from_pandas(_with_index(batch), preserve_index=False)
    if isinstance(batch, Mapping):
        try:
            return pa.table(_arrays(batch))
        except pa.ArrowInvalid as error:
            lengths = {name: len(column) for name, column in batch.items()}
            raise TypeError(f"a batch has columns of different lengths or types: {lengths}: {error}") from error
    raise TypeError(f"a batch is a dict of columns, an Arrow table or a DataFrame, not a {type(batch).__name__}")


def _with_index(frame: Any) -> Any:
    """Returns a DataFrame with the named levels of its index as columns; an index without a name is left out."""
    names = [name for name in frame.index.names if name is not None]
    if taken := [name for name in names if name in frame.columns]:
        raise TypeError(f"a DataFrame has both an index and a column named {taken[0]!r}: rename one of them")
    return frame.reset_index(level=names) if names else frame


def _arrays(columns: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns columns as Arrow arrays by name. Raises TypeError if two names are the same text, such as 1 and "1"."""
    arrays: dict[str, Any] = {}
    for name, column in columns.items():
        if str(name) in arrays:
            raise TypeError(f"two columns of a batch have the name {str(name)!r} as text: give them different names")
        arrays[str(name)] = _array(column)
    return arrays


def _array(column: Any) -> Any:
    """Returns a column of a batch as an Arrow array."""
    import pyarrow as pa

    if isinstance(column, Ragged):
        if len(column.offsets) and int(column.offsets[-1]) > MAX_VALUES:
            count = int(column.offsets[-1])
            raise TypeError(f"a column of arrays has {count} values in one batch, too many: write smaller batches")
        return pa.ListArray.from_arrays(_array(column.offsets.int()), _array(column.values))
    if isinstance(column, torch.Tensor):
        column = column.detach().cpu().resolve_conj().resolve_neg()
        column = (column.float() if column.dtype == torch.bfloat16 else column).numpy()
    if isinstance(column, Mapping):
        arrays = _arrays(column)
        return pa.StructArray.from_arrays(list(arrays.values()), list(arrays))
    if getattr(column, "ndim", 1) > 1:
        if 0 in column.shape[1:]:
            raise TypeError(f"a column of shape {tuple(column.shape)} has no elements in a row: leave it out")
        inner = _array(column.reshape(-1, *column.shape[2:]))
        return pa.FixedSizeListArray.from_arrays(inner, column.shape[1])
    return pa.array(column)
