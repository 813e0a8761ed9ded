"""The schemas of tables whose files have different columns: of what ranks have written, and of a dataset's files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rankzero.data import kinds
from rankzero.data.manifest import File
from rankzero.errors import InvalidJobError

_ADVICE = "rewrite the table, or have Spark read it: dataset=a query or a DataFrame, which chooses columns and types"


def unify_written(schemas: Iterable[Any]) -> Any:
    """Returns the schema with the columns of all rows that ranks write; a column of nulls alone fits any.

    Raises:
        TypeError: a column has several types, or names differ only in case: Spark reads neither of two such columns.
    """
    import pyarrow as pa

    try:
        found = pa.unify_schemas(list(schemas))
    except pa.ArrowException as error:
        raise TypeError(
            f'{error}: write it with one type in all batches and on all ranks (pandas: dtype "Int64" keeps integers '
            "beside missing values)"
        ) from error
    names: dict[str, str] = {}
    for name in found.names:
        if (other := names.setdefault(name.lower(), name)) != name:
            raise TypeError(f"columns {other!r} and {name!r} differ only in case, and Spark reads neither")
    return found


def portable(table: Any) -> Any:
    """Returns a table in types that Spark reads from Parquet: times in microseconds, half precision as float32.

    Categories become their values: each batch has categories of its own, and their numbers may not fit together.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    for number, field in enumerate(table.schema):
        if (kind := _portable(field.type)) != field.type:
            options = pc.CastOptions(target_type=kind, allow_time_truncate=True)
            table = table.set_column(number, pa.field(field.name, kind), pc.cast(table.column(number), options=options))
    return table.replace_schema_metadata(None)


def _portable(kind: Any) -> Any:
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(kind):
        return _portable(kind.value_type)
    if types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    if types.is_time(kind):
        return pa.time64("us")
    if types.is_duration(kind):
        return pa.duration("us")
    if types.is_date(kind):
        return pa.date32()
    if types.is_float16(kind):
        return pa.float32()
    if types.is_struct(kind):
        return pa.struct([field.with_type(_portable(field.type)) for field in kind])
    if types.is_map(kind):
        return pa.map_(_portable(kind.key_type), _portable(kind.item_type), kind.keys_sorted)
    if types.is_fixed_size_list(kind):
        return pa.list_(_portable(kind.value_type), kind.list_size)
    if types.is_large_list(kind):
        return pa.large_list(_portable(kind.value_type))
    return pa.list_(_portable(kind.value_type)) if types.is_list(kind) else kind


def nulls(schema: Any) -> list[str]:
    """Returns the names of the columns that have no type, since all their values are null."""
    import pyarrow as pa

    return [field.name for field in schema if pa.types.is_null(field.type)]


def schema_of_files(schemas: Sequence[Any], where: str) -> Any:
    """Returns the schema with the columns of a table and all of its files. ``where`` names the dataset in errors.

    Raises:
        InvalidJobError: a column has several types.
    """
    import pyarrow as pa

    try:
        return pa.unify_schemas(
            [pa.schema([each.with_type(kinds.stored(each.type)) for each in schema]) for schema in schemas]
        )
    except pa.ArrowException as error:
        raise InvalidJobError(f"the files of {where} have columns of different types ({error}): {_ADVICE}") from error


def check_missing(file: File, inside: Any, schema: Any, where: str) -> None:
    """Raises InvalidJobError if a file lacks a column of the table, and a tensor cannot represent the nulls."""
    for field in schema:
        is_missing = field.name not in file.partition and field.name not in inside.names
        if is_missing and not kinds.allows_null(field.type):
            raise InvalidJobError(
                f"column {field.name!r} of {where} ({field.type}) is not in {file.location}, and a tensor has no place "
                f"for nulls of this type: {_ADVICE}"
            )
