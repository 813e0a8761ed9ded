"""The schemas of tables whose files have different ones: of what ranks have written, and of a dataset's files."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rankzero.data import kinds, widening
from rankzero.data.manifest import ARROW, File
from rankzero.errors import InvalidJobError

_ADVICE = "rewrite the table, or have Spark read it: dataset=a query or a DataFrame, which chooses columns and types"


def unify(schemas: Iterable[Any], *, exact: bool = False) -> Any:
    """Returns the schema with the columns of all schemas, each with a type that holds the values of all.

    Args:
        schemas: The schemas.
        exact: Whether to refuse a type that holds some values only approximately (such as the common type of 64-bit
            integers and floats), and columns whose names differ only in case. A reader passes
            False.

    Raises:
        pyarrow.ArrowException: the types of a column have no common type.
    """
    import pyarrow as pa

    distinct = _distinct(schemas)
    found = pa.unify_schemas(distinct, promote_options="permissive")
    if exact:
        advice = (
            ': write it with one type in all batches and on all ranks (pandas: dtype "Int64" keeps integers beside '
            "missing values)"
        )
        _check_exact(found, distinct, advice)
        _check_case(found, "columns")
    return found


def _distinct(schemas: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for schema in schemas:
        if not any(schema.equals(other) for other in found):
            found.append(schema)
    return found


def _check_exact(wide: Any, schemas: Iterable[Any], advice: str = "") -> None:
    import pyarrow as pa

    for field in itertools.chain(*schemas):
        kind = wide.field(field.name).type
        if not widening.holds(kind, field.type):
            raise pa.ArrowTypeError(
                f"column {field.name!r} has several types, and not every {field.type} is exactly a {kind}{advice}"
            )


def _check_case(fields: Iterable[Any], what: str) -> None:
    """Raises an error for names that differ only in case, since Spark cannot read any of them."""
    import pyarrow as pa

    names: dict[str, str] = {}
    for field in fields:
        if (other := names.setdefault(field.name.lower(), field.name)) != field.name:
            raise pa.ArrowTypeError(f"{what} {other!r} and {field.name!r} differ only in case, and Spark reads neither")
        for kind in widening.structs(field.type):
            _check_case(kind, f"column {field.name!r}: fields")


def fit(table: Any, schema: Any) -> Any:
    """Returns a table in a unified schema: types are widened, times truncated, missing columns are nulls.

    Raises:
        pyarrow.ArrowInvalid: a value does not fit into the type of its column; the error names the column.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    columns = []
    for field in schema:
        if field.name not in table.schema.names:
            columns.append(pa.nulls(table.num_rows, field.type))
            continue
        try:
            options = pc.CastOptions(target_type=field.type, allow_time_truncate=True)
            columns.append(pc.cast(table.column(field.name), options=options))
        except pa.ArrowException as error:
            raise pa.ArrowInvalid(f"column {field.name!r}: {error}") from error
    return pa.table(columns, schema=schema)


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


def schema_of_files(first: Any, schemas: Sequence[Any], where: str) -> Any:
    """Returns the schema with the columns of all files, each of a type that holds all files' values exactly.

    Times of several units are in microseconds, as in a tensor: nanoseconds lack most of the years.

    Args:
        first: The schema of one file, with the partition columns from names of directories.
        schemas: The schemas of all files.
        where: The dataset's name for messages.

    Raises:
        InvalidJobError: a column has no such type.
    """
    import pyarrow as pa

    distinct = _distinct([first, *schemas])
    try:
        found = unify(distinct)
        _check_exact(found, distinct)
        every = (each for each in itertools.chain(*distinct) if not pa.types.is_null(each.type))
        mixed = {each.name for each in every if each.type != found.field(each.name).type}
        return pa.schema([each.with_type(_portable(each.type)) if each.name in mixed else each for each in found])
    except pa.ArrowException as error:
        raise InvalidJobError(f"the files of {where} have columns of different types ({error}): {_ADVICE}") from error


def with_nulls(files: Sequence[File], schemas: Sequence[Any], schema: Any, kind: str, where: str) -> tuple[File, ...]:
    """Returns the files with nulls as partition values for the columns that they lack.

    Args:
        files: The files of the table.
        schemas: The schema of each file.
        schema: The schema of the table.
        kind: The format of the files.
        where: The dataset's name for messages.

    Raises:
        InvalidJobError: a tensor cannot represent such nulls, or ranks cannot convert a file's type to the table's.
    """
    types: dict[str, list[Any]] = {}
    for field in itertools.chain(*schemas) if kind == ARROW else ():
        types.setdefault(field.name, []).append(kinds.stored(field.type))
    paired = zip(files, schemas, strict=True)
    return tuple(_with_nulls(file, inside, schema, kind, where, types) for file, inside in paired)


def _with_nulls(file: File, inside: Any, schema: Any, kind: str, where: str, types: Mapping[str, list[Any]]) -> File:
    import pyarrow as pa

    missing: dict[str, str | None] = {}
    for field in schema:
        if field.name in file.partition:
            continue
        if field.name not in inside.names:
            if not kinds.allows_null(field.type):
                raise InvalidJobError(
                    f"column {field.name!r} of {where} ({field.type}) is not in {file.location}, and a tensor has no "
                    f"place for nulls of this type: {_ADVICE}"
                )
            missing[field.name] = None
            continue
        found = inside.field(field.name).type
        try:
            # Ranks decode Parquet into the table's type, but map Arrow files without conversion.
            if kinds.stored(found) != field.type and kind == ARROW:
                raise pa.ArrowInvalid(f"it is {found}")
            pa.nulls(0, found).cast(field.type)
        except pa.ArrowException as error:
            # The table's type may be one that no file has.
            other = next((each for each in types.get(field.name, ()) if each != kinds.stored(found)), field.type)
            raise InvalidJobError(
                f"column {field.name!r} of {where} is {other}, and in {file.location} {found}: {_ADVICE}"
            ) from error
    return replace(file, partition={**file.partition, **missing}) if missing else file
